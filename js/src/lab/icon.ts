/** A GPU: a chip on a card, in JupyterLab's own colors. */

import { LabIcon } from '@jupyterlab/ui-components';

export const gpuIcon = new LabIcon({
  name: 'gpumagic:gpu',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24"><path class="jp-icon3 jp-icon-selectable" fill="#616161" fill-rule="evenodd" d="M2 3v18h2v-2h2v2h12v-3h4V7H4V3zm3 6h15v7H5zm3.5 1a2.5 2.5 0 100 5 2.5 2.5 0 000-5zm0 1.5a1 1 0 110 2 1 1 0 010-2zm7-1.5a2.5 2.5 0 100 5 2.5 2.5 0 000-5zm0 1.5a1 1 0 110 2 1 1 0 010-2z"/></svg>`,
});

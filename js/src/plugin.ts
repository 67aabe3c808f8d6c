import type { JupyterFrontEndPlugin } from '@jupyterlab/application';

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'gpumagic:plugin',
  autoStart: true,
  activate: () => {},
};

export default plugin;

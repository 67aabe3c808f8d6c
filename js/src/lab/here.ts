/** The kernel of the notebook or console that has the focus; null where there is none. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ISessionContext } from '@jupyterlab/apputils';

/** Any widget with a session: so no notebook package is needed. */
interface Sessions {
  sessionContext?: ISessionContext;
}

export function followKernel(
  shell: JupyterFrontEnd.IShell,
  changed: (kernel: string | null) => void,
): void {
  let context: ISessionContext | undefined;
  let last: string | null = null;
  const tell = () => {
    const kernel = context?.session?.kernel?.id ?? null;
    if (kernel === last) return;
    last = kernel;
    changed(kernel);
  };
  const follow = () => {
    const next = (shell.currentWidget as Sessions | null)?.sessionContext;
    if (next === context) return;
    context?.kernelChanged.disconnect(tell);
    context = next;
    context?.kernelChanged.connect(tell);
    tell();
  };
  shell.currentChanged?.connect(follow);
  follow();
}

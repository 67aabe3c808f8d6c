/** The notebook or console that has the focus, and its kernel; null where there is none. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ISessionContext } from '@jupyterlab/apputils';

/** Any widget with a session: so no notebook package is needed. */
export interface WithSession {
  sessionContext?: ISessionContext;
}

export function followKernel(
  shell: JupyterFrontEnd.IShell,
  changed: (kernel: string | null, context: ISessionContext | null) => void,
): void {
  let context: ISessionContext | null = null;
  let last: string | null = null;
  const kernel = () => context?.session?.kernel?.id ?? null;
  const tell = () => {
    last = kernel();
    changed(last, context);
  };
  const tellKernel = () => {
    if (kernel() !== last) tell();
  };
  const follow = () => {
    const next = (shell.currentWidget as WithSession | null)?.sessionContext ?? null;
    if (next === context) return;
    context?.kernelChanged.disconnect(tellKernel);
    context?.propertyChanged.disconnect(tell);
    context = next;
    context?.kernelChanged.connect(tellKernel);
    // A notebook that gets another name.
    context?.propertyChanged.connect(tell);
    tell();
  };
  shell.currentChanged?.connect(follow);
  follow();
}

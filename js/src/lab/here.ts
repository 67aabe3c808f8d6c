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
    // A picture, a text, or the page of the GPUs beside it: the notebook is still the one at hand.
    const stays = !next && shell.currentWidget && context && !context.isDisposed;
    if (next === context || stays) return;
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

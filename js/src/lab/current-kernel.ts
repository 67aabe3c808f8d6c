/** Find the current notebook’s kernel and all kernels that this page is connected to. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel } from '@jupyterlab/services';

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

const AREAS = ['main', 'left', 'right', 'down'];

/** Those of the notebooks and consoles that are open here. */
export function* connections(shell: JupyterFrontEnd.IShell): Iterable<Kernel.IKernelConnection> {
  for (const area of AREAS)
    for (const widget of shell.widgets(area)) {
      const kernel = (widget as WithSession).sessionContext?.session?.kernel;
      if (kernel) yield kernel;
    }
}

/** The notebook or console of each kernel, by the kernel's id. */
export function names({ serviceManager }: JupyterFrontEnd): Map<string, string> {
  const found = new Map<string, string>();
  for (const { kernel, path, name, type } of serviceManager.sessions.running()) {
    // A console may share a notebook's kernel; it is the notebook that people look for.
    if (kernel && (type === 'notebook' || !found.has(kernel.id)))
      found.set(kernel.id, type === 'notebook' ? path : name);
  }
  return found;
}

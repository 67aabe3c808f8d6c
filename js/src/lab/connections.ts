/** The kernels that this page is connected to, and the names of all that the server has. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { Kernel } from '@jupyterlab/services';
import type { WithSession } from './here.js';

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

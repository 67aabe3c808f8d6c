/** Find and ask the kernels that this page is connected to; the current notebook's is one. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ISessionContext } from '@jupyterlab/apputils';
import { type Kernel, KernelMessage } from '@jupyterlab/services';
import type { Snapshot } from '../snapshot.js';
import type { Environment } from './stream.js';

/** Any widget with a session, so that no notebook package is needed. */
export interface WithSession {
  sessionContext?: ISessionContext;
}

const TIMEOUT_MS = 5000;
const AREAS = ['main', 'left', 'right', 'down'];

/** Call with the focused notebook or console and its kernel's id, now and after each change. */
export function followKernel(
  shell: JupyterFrontEnd.IShell,
  changed: (kernel: string | null, context: ISessionContext | null) => void,
): void {
  let context: ISessionContext | null = null;
  let last: string | null = null;
  const kernel = () => context?.session?.kernel?.id ?? null;
  const call = () => {
    last = kernel();
    changed(last, context);
  };
  const onKernel = () => {
    if (kernel() !== last) call();
  };
  const follow = () => {
    const next = (shell.currentWidget as WithSession | null)?.sessionContext ?? null;
    // A focused image, text or GPU page keeps the notebook current.
    const stays = !next && shell.currentWidget && context && !context.isDisposed;
    if (next === context || stays) return;
    context?.kernelChanged.disconnect(onKernel);
    context?.propertyChanged.disconnect(call);
    context = next;
    context?.kernelChanged.connect(onKernel);
    // The notebook's name.
    context?.propertyChanged.connect(call);
    call();
  };
  shell.currentChanged?.connect(follow);
  follow();
}

/** Return the kernels of the open notebooks and consoles. */
export function* connections(shell: JupyterFrontEnd.IShell): Iterable<Kernel.IKernelConnection> {
  for (const area of AREAS)
    for (const widget of shell.widgets(area)) {
      const kernel = (widget as WithSession).sessionContext?.session?.kernel;
      if (kernel) yield kernel;
    }
}

/** Return the notebook or console of each kernel on the server, by the kernel's id. */
export function notebookNames({ serviceManager }: JupyterFrontEnd): Map<string, string> {
  const found = new Map<string, string>();
  for (const { kernel, path, name, type } of serviceManager.sessions.running()) {
    // A console can share a notebook's kernel; the notebook's name wins.
    // The path of a console, and at first that of a new notebook, is an id without a suffix.
    if (kernel && (type === 'notebook' || !found.has(kernel.id)))
      found.set(kernel.id, /\.[^/]+$/.test(path) ? path : name);
  }
  return found;
}

/** A kernel's answer. */
export interface Answer {
  pid?: number;
  snapshot?: Snapshot | null;
  comms?: Record<string, unknown>;
}

/** Send a request on the control channel, which answers while a cell runs; null if it does not. */
export async function ask(
  kernel: Kernel.IKernelConnection,
  type: string,
  content: object,
  environment: Pick<Environment, 'after'>,
): Promise<Answer | null> {
  const message = KernelMessage.createMessage({
    channel: 'control',
    // The library declares only its own types of messages, but sends any.
    msgType: type as 'debug_request',
    session: kernel.clientId,
    username: kernel.username,
    content: content as KernelMessage.IDebugRequestMsg['content'],
  });
  const future = kernel.sendControlMessage(message, true);
  const stop = environment.after(TIMEOUT_MS, () => future.dispose());
  // The promise fails if the future is disposed, or the kernel is restarted or gone.
  const reply = await future.done.catch(() => null);
  stop();
  return (reply?.content as Answer | undefined) ?? null;
}

/**
 * Whether JupyterLab distinguishes an answer on the control channel from the end of a cell.
 *
 * JupyterLab does from 4.5 on, and Notebook from 7.5 on, if the server lists our request among the
 * `untracked` types of messages.
 */
export function isAble(version: string, untracked: string): boolean {
  const [major = 0, minor = 0] = version.split('.').map(Number);
  const able = major === 4 || major === 7 ? minor >= 5 : major > 4;
  return able && untracked.includes('gpumagic_request');
}

/** Questions on a kernel's control channel, which is answered also while a cell runs. */

import { type Kernel, KernelMessage } from '@jupyterlab/services';

export type Content = Record<string, unknown>;

/** After so many milliseconds an answer is no longer waited for. */
const PATIENCE_MS = 5000;

/** What the kernel answers; null where it does not, in time. */
export async function ask(
  kernel: Kernel.IKernelConnection,
  type: string,
  content: Content,
  after: (milliseconds: number, then: () => void) => () => void,
): Promise<Content | null> {
  const message = KernelMessage.createMessage({
    channel: 'control',
    // The library's types know its own messages only; it sends any.
    msgType: type as 'debug_request',
    session: kernel.clientId,
    username: kernel.username,
    content: content as unknown as KernelMessage.IDebugRequestMsg['content'],
  });
  const future = kernel.sendControlMessage(message, true);
  const stop = after(PATIENCE_MS, () => future.dispose());
  try {
    return (await future.done).content as unknown as Content;
  } catch {
    // Put off, or the kernel was started anew or went.
    return null;
  } finally {
    stop();
  }
}

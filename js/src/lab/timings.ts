/** The comparisons that the current notebook has shown since this page was loaded. */

import type { ISessionContext } from '@jupyterlab/apputils';
import type { KernelMessage } from '@jupyterlab/services';
import type { Result } from '../snapshot.js';

const SHOWN = ['display_data', 'execute_result'];
/** What gpumagic/timing/comparison_view.py puts around the code of a comparison. */
const TITLE = '.gpumagic .gm-code.gm-title';
const KEPT = 50;

/** A comparison that a kernel shows; null where it shows anything else. */
export function comparison(
  message: Pick<KernelMessage.IMessage, 'header' | 'content'>,
): Result | null {
  const { header, content } = message;
  if (!SHOWN.includes(header.msg_type)) return null;
  const data = (content as { data?: Record<string, unknown> }).data ?? {};
  const { 'text/html': html, 'text/plain': text } = data;
  // Outputs may be megabytes, and most are others'.
  if (typeof html !== 'string' || !html.includes('gm-title')) return null;
  const page = new DOMParser().parseFromString(html, 'text/html');
  const title = page.querySelector(TITLE)?.textContent;
  if (!title) return null;
  const time = Date.parse(header.date) / 1000 || Date.now() / 1000;
  return { id: header.msg_id, title, time, text: String(text ?? ''), html };
}

export class Timings {
  #tell: (results: Result[]) => void;
  #all = new WeakMap<ISessionContext, Result[]>();
  #context: ISessionContext | null = null;

  /** `tell` gets those of the current notebook, the newest first. */
  constructor(tell: (results: Result[]) => void) {
    this.#tell = tell;
  }

  /** The current notebook or console. */
  here(context: ISessionContext | null): void {
    this.#context = context;
    if (context && !this.#all.has(context)) {
      this.#all.set(context, []);
      context.iopubMessage.connect(this.#hear);
    }
    this.#tell((context && this.#all.get(context)) ?? []);
  }

  #hear = (context: ISessionContext, message: KernelMessage.IMessage): void => {
    const made = comparison(message);
    if (!made) return;
    const all = [made, ...(this.#all.get(context) ?? [])].slice(0, KEPT);
    this.#all.set(context, all);
    if (context === this.#context) this.#tell(all);
  };
}

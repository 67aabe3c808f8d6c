/**
 * Asks the current notebook's kernel what holds its GPUs' memory: only while somebody has that
 * table open and in sight, and only between cells. Nothing is written into the notebook.
 */

import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import type { Translate } from '../monitor/shared.js';
import { type Holdings, TOO_LONG_S } from '../snapshot.js';
import type { Deferred } from './feeds.js';

type Told = Pick<Deferred, 'holdings'>;

/** An expression, so that no name of the notebook's is touched. */
const PANEL = "__import__('gpumagic.widget.held_now', fromlist=['panel']).panel()";

export class HoldingsOf {
  #isSeen: (monitor: Told) => boolean;
  #t: Translate;
  #wanted = new Set<Told>();
  #context: ISessionContext | null = null;
  #kernel: string | null = null;
  /** A cell ran, or somebody came, since the last answer. */
  #due = true;
  #slow = false;
  #asking = false;

  /** `isSeen`: whether a monitor is in sight. */
  constructor(isSeen: (monitor: Told) => boolean, t: Translate) {
    this.#isSeen = isSeen;
    this.#t = t;
  }

  /** Somebody opened the table in a monitor, or closed the last one. */
  want(monitor: Told, open: boolean): void {
    if (!open) {
      this.#wanted.delete(monitor);
      return;
    }
    this.#wanted.add(monitor);
    this.#due = true;
    void this.#ask();
  }

  /** A monitor came into sight, perhaps. */
  look(): void {
    void this.#ask();
  }

  /** The current notebook or console, and its kernel. */
  here(kernel: string | null, context: ISessionContext | null): void {
    if (context !== this.#context) {
      this.#context?.iopubMessage.disconnect(this.#hear);
      this.#context?.statusChanged.disconnect(this.#look);
      this.#context = context;
      context?.iopubMessage.connect(this.#hear);
      context?.statusChanged.connect(this.#look);
    }
    if (kernel === this.#kernel) return;
    this.#kernel = kernel;
    this.#due = true;
    this.#slow = false;
    this.#tell(null);
    void this.#ask();
  }

  #look = (_: ISessionContext, status: Kernel.Status): void => {
    if (status.endsWith('restarting')) {
      this.#due = true;
      this.#slow = false;
      this.#tell(null);
    }
    void this.#ask();
  };

  /** What we ask makes a kernel busy, too, but is no input. */
  #hear = (_: ISessionContext, { header }: KernelMessage.IMessage): void => {
    if (header.msg_type === 'execute_input' && !this.#slow) this.#due = true;
  };

  #tell(held: Holdings | string | null): void {
    for (const monitor of this.#wanted) monitor.holdings(held);
  }

  async #ask(): Promise<void> {
    const kernel = this.#context?.session?.kernel;
    if (!this.#due || this.#asking || ![...this.#wanted].some(this.#isSeen)) return;
    if (kernel?.status !== 'idle') return;
    this.#asking = true;
    this.#due = false;
    try {
      const held = await this.#answer(kernel);
      // Of another notebook by now, or it was put off: the kernel says when it is idle again.
      if (held === null) this.#due = true;
      else if (kernel.id === this.#kernel) {
        this.#slow = typeof held === 'object' && held.seconds >= TOO_LONG_S;
        this.#tell(held);
      }
    } catch {
      // The kernel was started anew, or is gone.
      this.#due = true;
    } finally {
      this.#asking = false;
    }
    if (kernel.id !== this.#kernel) void this.#ask();
  }

  /** Null where the kernel did not come to it. */
  async #answer(kernel: Kernel.IKernelConnection): Promise<Holdings | string | null> {
    const future = kernel.requestExecute(
      {
        code: '',
        silent: true,
        store_history: false,
        allow_stdin: false,
        user_expressions: { held: PANEL },
      },
      true,
    );
    const { content } = await future.done;
    if (content.status !== 'ok') return null;
    const answer = content.user_expressions['held'] as {
      status?: string;
      ename?: string;
      evalue?: string;
      data?: { 'application/json'?: Holdings };
    };
    const held = answer?.data?.['application/json'];
    if (held?.gpus) return held;
    if (answer?.ename === 'ModuleNotFoundError')
      return this.#t('This kernel has no gpumagic: run %pip install gpumagic in it.');
    return answer?.evalue || this.#t('This kernel cannot tell.');
  }
}

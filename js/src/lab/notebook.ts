/** Follow the current notebook: its variables on the GPUs, and the results that it shows. */

import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import type { Translate } from '../monitor/shared.js';
import { type Result, SLOW_S, type Variables } from '../snapshot.js';

/** An expression changes no name of the notebook. */
const EXPRESSION = "__import__('gpumagic.widget.notebook_watch', fromlist=['panel']).panel()";

type Answer = Variables | string | null;

/**
 * Asks the current notebook's kernel for its variables on the GPUs.
 *
 * It is asked only while a table of them is visible, and only between cells. Nothing is written
 * into the notebook.
 */
export class VariablesClient {
  #show: (answer: Answer) => void;
  #trans: Translate;
  #context: ISessionContext | null = null;
  #kernel: string | null = null;
  /** The answer is missing, or a cell has run since. */
  #due = true;
  #slow = false;
  #asking = false;

  constructor(show: (answer: Answer) => void, trans: Translate) {
    [this.#show, this.#trans] = [show, trans];
  }

  /** Change the current notebook or console and its kernel. */
  setCurrent(kernel: string | null, context: ISessionContext | null): void {
    if (context !== this.#context) {
      this.#context?.iopubMessage.disconnect(this.#onMessage);
      this.#context?.statusChanged.disconnect(this.#onStatus);
      this.#context = context;
      context?.iopubMessage.connect(this.#onMessage);
      context?.statusChanged.connect(this.#onStatus);
    }
    if (kernel === this.#kernel) return;
    this.#kernel = kernel;
    this.#forget();
  }

  #onStatus = (_: ISessionContext, status: Kernel.Status): void => {
    if (status.endsWith('restarting')) this.#forget();
  };

  /** Our own requests make the kernel busy too, but have no input. */
  #onMessage = (_: ISessionContext, { header }: KernelMessage.IMessage): void => {
    if (header.msg_type === 'execute_input' && !this.#slow) this.#due = true;
  };

  #forget(): void {
    this.#due = true;
    this.#slow = false;
    this.#show(null);
  }

  /** Ask the kernel if an answer is due, or the user pressed, and no cell runs. */
  async request(pressed: boolean): Promise<void> {
    const kernel = this.#context?.session?.kernel;
    this.#due ||= pressed;
    if (!this.#due || this.#asking || kernel?.status !== 'idle') return;
    this.#asking = true;
    this.#due = false;
    const answer = await this.#ask(kernel).catch(() => null);
    this.#asking = false;
    // The kernel did not get to it, or another one is current.
    if (answer === null || kernel.id !== this.#kernel) {
      this.#due = true;
      return;
    }
    this.#slow = typeof answer === 'object' && answer.seconds >= SLOW_S;
    this.#show(answer);
  }

  async #ask(kernel: Kernel.IKernelConnection): Promise<Answer> {
    const options = { silent: true, store_history: false, allow_stdin: false };
    const content = { code: '', ...options, user_expressions: { variables: EXPRESSION } };
    const { content: reply } = await kernel.requestExecute(content, true).done;
    if (reply.status !== 'ok') return null;
    const { data, ename, evalue } = reply.user_expressions['variables'] as {
      ename?: string;
      evalue?: string;
      data?: { 'application/json'?: Variables };
    };
    const variables = data?.['application/json'];
    if (variables?.gpus) return variables;
    if (ename === 'ModuleNotFoundError')
      return this.#trans.__('This kernel has no gpumagic: run %pip install gpumagic in it.');
    return evalue || this.#trans.__('This kernel cannot list its variables.');
  }
}

/** All records are displayed with this type too; those with bars are measurements. */
const TYPE = 'application/vnd.gpumagic+json';
const SHOWN = ['display_data', 'execute_result'];
const MOST = 50;

/** Return the result that a message displays; null if it displays something else. */
export function resultOf({ header, content }: KernelMessage.IMessage): Result | null {
  if (!SHOWN.includes(header.msg_type)) return null;
  const data = (content as { data?: Record<string, unknown> }).data;
  const result = data?.[TYPE] as Pick<Result, 'title' | 'bars'> | undefined;
  if (!result?.bars) return null;
  const time = Date.parse(header.date) / 1000 || Date.now() / 1000;
  return { ...result, id: header.msg_id, time, text: String(data?.['text/plain'] ?? '') };
}

/** Collects the results that the current notebook has shown since this page was loaded. */
export class Timings {
  #show: (results: Result[]) => void;
  #all = new WeakMap<ISessionContext, Result[]>();
  #context: ISessionContext | null = null;

  /** `show` gets the results of the current notebook, the newest first. */
  constructor(show: (results: Result[]) => void) {
    this.#show = show;
  }

  /** Change the current notebook or console. */
  setCurrent(context: ISessionContext | null): void {
    this.#context = context;
    if (context && !this.#all.has(context)) {
      this.#all.set(context, []);
      context.iopubMessage.connect(this.#onMessage);
    }
    this.#show((context && this.#all.get(context)) ?? []);
  }

  #onMessage = (context: ISessionContext, message: KernelMessage.IMessage): void => {
    const result = resultOf(message);
    if (!result) return;
    const all = [result, ...(this.#all.get(context) ?? [])].slice(0, MOST);
    this.#all.set(context, all);
    if (context === this.#context) this.#show(all);
  };
}

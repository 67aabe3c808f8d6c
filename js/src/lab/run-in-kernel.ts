/**
 * Run lines in the kernel of the current notebook, on request.
 *
 * Nothing is written into the notebook, and its cells keep their numbers. A failure is an error of
 * one line.
 */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import type { Translate } from '../monitor/shared.js';
import type { WithSession } from './current-kernel.js';

/** The part of the application that is used. */
export interface Application {
  commands: Pick<JupyterFrontEnd['commands'], 'execute' | 'hasCommand'>;
  serviceManager: {
    kernelspecs: Pick<JupyterFrontEnd['serviceManager']['kernelspecs'], 'ready' | 'specs'>;
  };
}

interface Ran {
  notebook: string;
  printed: string;
}

const NEW = 'notebook:create-new';

export class RunInKernel {
  #app: Application;
  #t: Translate;

  constructor(app: Application, t: Translate) {
    [this.#app, this.#t] = [app, t];
  }

  /** Run the lines, in a new notebook if there is no current one. */
  async run(context: ISessionContext | null, lines: string[]): Promise<Ran> {
    const session = context ?? (await this.#open());
    // The kernel of a closed notebook never answers.
    const closed = new Promise<never>((_, reject) => {
      session.disposed.connect(() => reject(new Error(this.#t('%1 was closed.', session.name))));
    });
    return Promise.race([this.#runIn(session, lines), closed]);
  }

  async #runIn(session: ISessionContext, lines: string[]): Promise<Ran> {
    await session.ready;
    const notebook = session.name;
    const kernel = await this.#ready(session.session?.kernel, notebook);
    const printed: string[] = [];
    const options = { silent: true, store_history: false, allow_stdin: false };
    const future = kernel.requestExecute({ code: lines.join('\n'), ...options }, true);
    future.onIOPub = (message) => {
      if (message.header.msg_type !== 'stream') return;
      const { name, text } = (message as KernelMessage.IStreamMsg).content;
      if (name === 'stdout') printed.push(text);
    };
    const { content } = await future.done;
    if (content.status !== 'ok') throw new Error(this.#reason(content, notebook));
    return { notebook, printed: printed.join('').trim() };
  }

  /** Return the kernel if it can run lines now. */
  async #ready(
    kernel: Kernel.IKernelConnection | null | undefined,
    notebook: string,
  ): Promise<Kernel.IKernelConnection> {
    const t = this.#t;
    if (!kernel) throw new Error(t('%1 has no kernel: start one from the Kernel menu.', notebook));
    if (kernel.status === 'dead')
      throw new Error(t('The kernel of %1 is dead: restart it from the Kernel menu.', notebook));
    if (kernel.status === 'busy')
      throw new Error(t('%1 is running a cell: press again when it has finished.', notebook));
    const language = (await kernel.info).language_info.name;
    if (language === 'python') return kernel;
    throw new Error(t('The kernel of %1 is %2: virtual GPUs need Python.', notebook, language));
  }

  /** Open a new notebook with a Python kernel. */
  async #open(): Promise<ISessionContext> {
    const { commands, serviceManager } = this.#app;
    await serviceManager.kernelspecs.ready;
    const specs = serviceManager.kernelspecs.specs;
    const python = Object.values(specs?.kernelspecs ?? {}).filter(
      (spec) => spec?.language === 'python',
    );
    const best = python.find((spec) => spec?.name === specs?.default) ?? python[0];
    if (!best) throw new Error(this.#t('This server has no Python kernel.'));
    const opened: WithSession | null = commands.hasCommand(NEW)
      ? await commands.execute(NEW, { kernelName: best.name })
      : null;
    if (opened?.sessionContext) return opened.sessionContext;
    throw new Error(this.#t('Open a notebook first.'));
  }

  #reason(
    content: KernelMessage.IReplyAbortContent | KernelMessage.IReplyErrorContent,
    name: string,
  ): string {
    if (content.status !== 'error')
      return this.#t('%1 did not run it: an earlier cell failed. Press again.', name);
    const { ename, evalue } = content;
    if (ename === 'ModuleNotFoundError' && evalue.includes("'gpumagic'"))
      return this.#t('The kernel of %1 has no gpumagic: run %pip install gpumagic in it.', name);
    return evalue.split('\n')[0] || ename;
  }
}

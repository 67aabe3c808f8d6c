/**
 * Runs lines of ours in the kernel of the current notebook, where a person asked for it.
 *
 * What cannot be is an error of one line. Nothing is written into the notebook, and its cells keep
 * their numbers.
 */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import type { Translate } from '../monitor/shared.js';
import type { WithSession } from './current-kernel.js';

/** What of the application is used. */
export interface Application {
  commands: Pick<JupyterFrontEnd['commands'], 'execute' | 'hasCommand'>;
  serviceManager: {
    kernelspecs: Pick<JupyterFrontEnd['serviceManager']['kernelspecs'], 'ready' | 'specs'>;
  };
}

/** Where they ran. */
interface Ran {
  notebook: string;
  printed: string;
}

const NEW = 'notebook:create-new';

export class Lines {
  #app: Application;
  #t: Translate;

  constructor(app: Application, t: Translate) {
    this.#app = app;
    this.#t = t;
  }

  /** Runs them, in a new notebook where there is no current one; its name, and what was printed. */
  async run(context: ISessionContext | null, lines: string[]): Promise<Ran> {
    const session = context ?? (await this.#open());
    // What is still to come from it never comes then.
    const closed = new Promise<never>((_, reject) => {
      session.disposed.connect(() => reject(new Error(this.#t('%1 was closed.', session.name))));
    });
    return Promise.race([this.#runIn(session, lines), closed]);
  }

  async #runIn(session: ISessionContext, lines: string[]): Promise<Ran> {
    await session.ready;
    const notebook = session.name;
    const kernel = await this.#kernel(session.session?.kernel, notebook);
    const printed: string[] = [];
    const future = kernel.requestExecute(
      { code: lines.join('\n'), silent: true, store_history: false, allow_stdin: false },
      true,
    );
    future.onIOPub = (message) => {
      if (message.header.msg_type !== 'stream') return;
      const { name, text } = (message as KernelMessage.IStreamMsg).content;
      if (name === 'stdout') printed.push(text);
    };
    const { content } = await future.done;
    if (content.status !== 'ok') throw new Error(this.#why(content, notebook));
    return { notebook, printed: printed.join('').trim() };
  }

  /** A kernel that can run them now. */
  async #kernel(
    kernel: Kernel.IKernelConnection | null | undefined,
    notebook: string,
  ): Promise<Kernel.IKernelConnection> {
    const t = this.#t;
    if (!kernel) throw new Error(t('%1 has no kernel: start one from the Kernel menu.', notebook));
    if (kernel.status === 'dead') {
      throw new Error(t('The kernel of %1 is dead: restart it from the Kernel menu.', notebook));
    }
    if (kernel.status === 'busy') {
      throw new Error(t('%1 is running a cell: press again when it has ended.', notebook));
    }
    const language = (await kernel.info).language_info.name;
    if (language !== 'python') {
      throw new Error(t('The kernel of %1 is %2: virtual GPUs need Python.', notebook, language));
    }
    return kernel;
  }

  /** A new notebook with a Python kernel. */
  async #open(): Promise<ISessionContext> {
    const { commands, serviceManager } = this.#app;
    await serviceManager.kernelspecs.ready;
    const specs = serviceManager.kernelspecs.specs;
    const python = Object.values(specs?.kernelspecs ?? {})
      .filter((spec) => spec?.language === 'python')
      .sort((one, other) => rank(other?.name, specs?.default) - rank(one?.name, specs?.default))[0];
    if (!python) throw new Error(this.#t('This server has no Python kernel.'));
    if (!commands.hasCommand(NEW)) throw new Error(this.#t('Open a notebook first.'));
    const opened: WithSession = await commands.execute(NEW, { kernelName: python.name });
    if (!opened.sessionContext) throw new Error(this.#t('Open a notebook first.'));
    return opened.sessionContext;
  }

  #why(content: KernelMessage.IReplyAbortContent | KernelMessage.IReplyErrorContent, name: string) {
    if (content.status !== 'error') {
      return this.#t('%1 did not run it: an earlier cell failed. Press again.', name);
    }
    const { ename, evalue } = content;
    if (ename === 'ModuleNotFoundError' && evalue.includes("'gpumagic'")) {
      return this.#t('The kernel of %1 has no gpumagic: run %pip install gpumagic in it.', name);
    }
    return evalue.split('\n')[0] || ename;
  }
}

const rank = (name: string | undefined, best: string | undefined) => Number(name === best);

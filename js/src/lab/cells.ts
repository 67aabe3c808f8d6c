/** Run lines in a notebook: as its first cell, or unseen; and find the cell of a run. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ISessionContext } from '@jupyterlab/apputils';
import type { KernelMessage } from '@jupyterlab/services';
import type { Translate } from '../monitor/shared.js';
import type { WithSession } from './current-kernel.js';

/** The part of a notebook's panel that is used, so that no notebook package is needed. */
interface NotebookPanel extends WithSession {
  id: string;
  context: { ready: Promise<void> };
  content: {
    model: { sharedModel: { insertCell(at: number, cell: object): unknown } };
    widgets: readonly {
      model: { executionCount: number | null; sharedModel: { source: string } };
    }[];
    activeCellIndex: number;
    scrollToItem?(index: number, align?: string): Promise<void>;
  };
}

/** The part of the application that is used. */
export interface Application {
  commands: Pick<JupyterFrontEnd['commands'], 'execute' | 'hasCommand'>;
  shell: Pick<JupyterFrontEnd['shell'], 'activateById' | 'widgets'>;
  serviceManager: {
    kernelspecs: Pick<JupyterFrontEnd['serviceManager']['kernelspecs'], 'ready' | 'specs'>;
  };
}

const NEW = 'notebook:create-new';

export class Cells {
  #app: Application;
  #trans: Translate;

  constructor(app: Application, trans: Translate) {
    [this.#app, this.#trans] = [app, trans];
  }

  /**
   * Put the lines into a first cell of the notebook and run it; return the notebook's name.
   *
   * A console gets them as its next cell. Without a current notebook or console, a new notebook is
   * opened. The cell shows the kernel's errors.
   */
  async runFirst(context: ISessionContext | null, lines: string[]): Promise<string> {
    const { commands, shell } = this.#app;
    const code = lines.join('\n');
    const panel = context ? this.#panelOf(context) : await this.#open();
    if (!panel) {
      await commands.execute('console:inject', { path: context?.path, code, activate: true });
      return context?.name ?? '';
    }
    await panel.context.ready;
    await panel.sessionContext?.ready;
    shell.activateById(panel.id);
    const { content } = panel;
    if (content.widgets[0]?.model.sharedModel.source !== code)
      content.model.sharedModel.insertCell(0, { cell_type: 'code', source: code });
    content.activeCellIndex = 0;
    const name = panel.sessionContext?.name ?? '';
    // The answer is false if the cell raised, or no kernel was chosen.
    if ((await commands.execute('notebook:run-cell-and-select-next')) === false)
      throw new Error(this.#trans.__('The first cell of %1 failed; its output says why.', name));
    return name;
  }

  /** Run lines in the kernel of a notebook, unseen; return what they print. */
  async run(context: ISessionContext, lines: string[]): Promise<string> {
    const trans = this.#trans;
    await context.ready;
    const kernel = context.session?.kernel;
    if (!kernel || kernel.status === 'dead')
      throw new Error(trans.__('%1 has no kernel: start one from the Kernel menu.', context.name));
    const printed: string[] = [];
    const options = { silent: true, store_history: false, allow_stdin: false };
    const future = kernel.requestExecute({ code: lines.join('\n'), ...options }, true);
    future.onIOPub = (message) => {
      if (message.header.msg_type !== 'stream') return;
      const { name, text } = (message as KernelMessage.IStreamMsg).content;
      if (name === 'stdout') printed.push(text);
    };
    const { content } = await future.done;
    if (content.status === 'ok') return printed.join('').trim();
    throw new Error(
      content.status === 'error'
        ? content.evalue.split('\n')[0] || content.ename
        : trans.__('%1 skipped it: an earlier cell failed. Press again.', context.name),
    );
  }

  /**
   * Select the cell of an open notebook that has this number, or whose source begins with `code`:
   * a cell whose kernel died has no number. Return whether there is one.
   */
  async show(context: ISessionContext, count: number | null, code?: string | null) {
    const content = this.#panelOf(context)?.content;
    const found = content?.widgets.map(({ model: { executionCount, sharedModel } }) =>
      code ? sharedModel.source.startsWith(code) : count !== null && executionCount === count,
    );
    const index = found?.lastIndexOf(true) ?? -1;
    if (!content || index < 0) return false;
    content.activeCellIndex = index;
    await content.scrollToItem?.(index, 'center');
    return true;
  }

  #panelOf(context: ISessionContext): NotebookPanel | undefined {
    for (const widget of this.#app.shell.widgets('main')) {
      const panel = widget as unknown as NotebookPanel;
      if (panel.sessionContext === context && panel.content?.model?.sharedModel) return panel;
    }
    return undefined;
  }

  /** Open a new notebook with a Python kernel. */
  async #open(): Promise<NotebookPanel> {
    const { commands, serviceManager } = this.#app;
    await serviceManager.kernelspecs.ready;
    const specs = serviceManager.kernelspecs.specs;
    const python = Object.values(specs?.kernelspecs ?? {}).filter(
      (spec) => spec?.language === 'python',
    );
    const best = python.find((spec) => spec?.name === specs?.default) ?? python[0];
    if (!best) throw new Error(this.#trans.__('This server has no Python kernel.'));
    if (commands.hasCommand(NEW)) return commands.execute(NEW, { kernelName: best.name });
    throw new Error(this.#trans.__('Open a notebook first.'));
  }
}

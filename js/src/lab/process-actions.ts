/** Act on a process from the panel or from an alert; confirm before anything ends. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { KernelAPI } from '@jupyterlab/services';
import type { Translate } from '../monitor/shared.js';
import { size } from '../monitor/units.js';
import type { KernelSample, Place, ProcessSample, Snapshot } from '../snapshot.js';
import type { Alert } from './alerts.js';
import type { Cells } from './cells.js';
import type { WithSession } from './current-kernel.js';
import type { Api } from './server.js';

/** How long an alert is shown; JupyterLab's list of notifications keeps it. A fault stays. */
const SHOWN_MS = 20_000;

interface Ended {
  ended?: boolean;
  message?: string;
}

export class ProcessActions {
  #app: JupyterFrontEnd;
  #api: Api;
  #trans: Translate;
  #cells: Pick<Cells, 'show'>;
  #state: () => { latest: Snapshot | null; here: string | null };
  /** The notifications of faults, by the alert's key. */
  #faults = new Map<string, string>();

  /** `state`: the latest snapshot, and the current notebook's kernel. */
  constructor(
    app: JupyterFrontEnd,
    api: Api,
    cells: Pick<Cells, 'show'>,
    trans: Translate,
    state: () => { latest: Snapshot | null; here: string | null },
  ) {
    [this.#app, this.#api, this.#cells, this.#trans] = [app, api, cells, trans];
    this.#state = state;
  }

  /** Open the notebook or console. */
  goTo = ({ kernel, notebook }: ProcessSample): Promise<void> =>
    this.#try(() => this.#open(kernel, notebook));

  /** Open the notebook of a cell that ran, and select the cell. */
  goToCell = ({ kernel, notebook, count, code }: Place): Promise<void> =>
    this.#try(async () => {
      const { sessionContext: context } = (await this.#open(kernel, notebook)) ?? {};
      await context?.ready;
      if (context && (await this.#cells.show(context, count, code))) return;
      Notification.info(this.#trans.__('In [%1] is no longer there.', count ?? ' '));
    });

  /** Interrupt a kernel; that of another notebook only after a confirmation. */
  interrupt = ({ kernel, notebook }: ProcessSample): Promise<void> =>
    this.#try(async () => {
      if (!kernel) return;
      const trans = this.#trans;
      const text = trans.__('%1 is not the current notebook.', notebook ?? kernel);
      const sure = () => confirm(trans.__('Interrupt the kernel?'), text, trans.__('Interrupt'));
      if (kernel === this.#state().here || (await sure())) await this.#interrupt(kernel);
    });

  /** Interrupt the cell that fills the RAM, as the settings say, and tell the user. */
  stopFilling = ({ kernel, notebook }: KernelSample): Promise<void> =>
    this.#try(async () => {
      await this.#interrupt(kernel);
      const name = notebook ?? kernel;
      const text = this.#trans.__('RAM was 97 % full: a cell of %1 was interrupted.', name);
      Notification.warning(text, { autoClose: false });
    });

  shutDown = (process: ProcessSample): Promise<void> =>
    this.#try(async () => {
      const { kernel } = process;
      if (!kernel) return;
      const trans = this.#trans;
      const session = await this.#session(kernel);
      const name = process.notebook ?? session?.path ?? nameOf(process);
      const held = this.#memory(process);
      const text = held
        ? trans.__('%1 holds %2. Its variables will be lost.', name, held)
        : trans.__('The variables of %1 will be lost.', name);
      if (!(await confirm(trans.__('Shut down the kernel?'), text, trans.__('Shut down')))) return;
      const { sessions, kernels } = this.#app.serviceManager;
      await (session ? sessions.shutdown(session.id) : kernels.shutdown(kernel));
    });

  /** Ask an orphaned process to end; kill it only after another confirmation. */
  terminate = (process: ProcessSample): Promise<void> =>
    this.#try(async () => {
      const trans = this.#trans;
      const { pid, started } = process;
      const holds = trans.__('%1 holds %2.', nameOf(process), this.#memory(process));
      const exited = trans.__('Its kernel has exited, but it still runs.');
      if (!(await confirm(trans.__('End the process?'), `${holds} ${exited}`, trans.__('End it'))))
        return;
      const answer = await this.#api.post<Ended | null>('terminate', { pid, started });
      if (answer?.ended !== false) return;
      const still = trans.__('It was asked to end but still runs.');
      if (!(await confirm(trans.__('Kill the process?'), `${holds} ${still}`, trans.__('Kill it'))))
        return;
      const last = await this.#api.post<Ended | null>('terminate', { pid, started, force: true });
      if (last?.ended === false && last.message) Notification.warning(last.message);
    });

  /** Show an alert; notifications take no focus. */
  notify({ key, kind, text, process, place }: Alert, show: () => void): void {
    const trans = this.#trans;
    const actions: Notification.IAction[] = [];
    const add = (label: string, callback: () => unknown) => actions.push({ label, callback });
    if (place?.code) add(trans.__('Go to In [%1]', place.count ?? ' '), () => this.goToCell(place));
    // Only this server's kernels can be reached from here.
    if (process && !process.server) {
      add(trans.__('Go to the notebook'), () => this.goTo(process));
      add(trans.__('Shut down…'), () => this.shutDown(process));
    } else add(trans.__('Show the GPUs'), show);
    const fault = kind === 'fault';
    const autoClose = fault ? false : SHOWN_MS;
    const id = Notification.emit(text, fault ? 'error' : 'warning', { autoClose, actions });
    if (fault) this.#faults.set(key, id);
  }

  /** Remove the notification of a fault that is over. */
  dismiss = (key: string): void => {
    const id = this.#faults.get(key);
    if (id !== undefined) Notification.dismiss(id);
    this.#faults.delete(key);
  };

  #interrupt(kernel: string): Promise<void> {
    return KernelAPI.interruptKernel(kernel, this.#app.serviceManager.serverSettings);
  }

  async #open(kernel: string | null, notebook: string | null): Promise<WithSession | undefined> {
    const session = await this.#session(kernel);
    const path = session?.path ?? notebook;
    const command = session?.type === 'console' ? 'console:open' : 'docmanager:open';
    if (!path) throw new Error(this.#trans.__('No notebook of this kernel is known.'));
    return this.#app.commands.execute(command, { path, activate: true });
  }

  async #session(kernel: string | null) {
    const { sessions } = this.#app.serviceManager;
    await sessions.refreshRunning();
    return [...sessions.running()].find((one) => one.kernel?.id === kernel);
  }

  /** Return the memory on all GPUs, including the other processes of its kernel; "" if none. */
  #memory({ pid, kernel, orphan }: ProcessSample): string {
    const processes = this.#state().latest?.processes ?? [];
    const all = processes.filter((one) =>
      kernel && !orphan ? one.kernel === kernel && !one.orphan : one.pid === pid,
    );
    if (!all.length) return '';
    const known = all.flatMap(({ memory }) => memory ?? []);
    return known.length ? size(known.reduce((a, b) => a + b)) : this.#trans.__('GPU memory');
  }

  /** Show a failure as a notification. */
  async #try(act: () => Promise<unknown>): Promise<void> {
    try {
      await act();
    } catch (error) {
      Notification.error(error instanceof Error ? error.message : String(error));
    }
  }
}

const nameOf = ({ name, pid }: ProcessSample) => `${name ?? ''} (PID ${pid})`.trim();

async function confirm(title: string, body: string, label: string): Promise<boolean> {
  const buttons = [Dialog.cancelButton(), Dialog.warnButton({ label })];
  return (await showDialog({ title, body, buttons, defaultButton: 0 })).button.accept;
}

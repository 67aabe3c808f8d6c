/** Act on a process from the panel or from an alert; confirm before anything ends. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { KernelAPI } from '@jupyterlab/services';
import type { Translate } from '../monitor/shared.js';
import { size } from '../monitor/units.js';
import type { ProcessSample, Snapshot } from '../snapshot.js';
import type { Alert } from './alerts.js';
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
  #t: Translate;
  #latest: () => Snapshot | null;
  /** The notifications of faults, by the alert's key. */
  #faults = new Map<string, string>();

  constructor(app: JupyterFrontEnd, api: Api, t: Translate, latest: () => Snapshot | null) {
    [this.#app, this.#api, this.#t, this.#latest] = [app, api, t, latest];
  }

  /** Open the notebook or console; one of another server opens in a new tab. */
  goTo = (process: ProcessSample): Promise<void> =>
    this.#try(async () => {
      const { server, notebook } = process;
      if (server) {
        const path = notebook?.split('/').map(encodeURIComponent).join('/');
        const url = server.replace(/\/*$/, '/') + (path ? `lab/tree/${path}` : '');
        window.open(url, '_blank', 'noopener');
        return;
      }
      const session = await this.#session(process);
      const path = session?.path ?? notebook;
      const command = session?.type === 'console' ? 'console:open' : 'docmanager:open';
      if (!path) throw new Error(this.#t('No notebook of this kernel is known.'));
      await this.#app.commands.execute(command, { path, activate: true });
    });

  interrupt = ({ kernel }: ProcessSample): Promise<void> =>
    this.#try(async () => {
      if (kernel) await KernelAPI.interruptKernel(kernel, this.#app.serviceManager.serverSettings);
    });

  shutDown = (process: ProcessSample): Promise<void> =>
    this.#try(async () => {
      const { kernel } = process;
      if (!kernel) return;
      const t = this.#t;
      const session = await this.#session(process);
      const name = process.notebook ?? session?.path ?? nameOf(process);
      const text = t('%1 holds %2. Its variables will be lost.', name, this.#memory(process));
      if (!(await confirm(t('Shut down the kernel?'), text, t('Shut down')))) return;
      const { sessions, kernels } = this.#app.serviceManager;
      await (session ? sessions.shutdown(session.id) : kernels.shutdown(kernel));
    });

  /** Ask an orphaned process to end; kill it only after another confirmation. */
  terminate = (process: ProcessSample): Promise<void> =>
    this.#try(async () => {
      const t = this.#t;
      const { pid, started } = process;
      const holds = t('%1 holds %2.', nameOf(process), this.#memory(process));
      const exited = t('Its kernel has exited, and it still runs.');
      if (!(await confirm(t('End the process?'), `${holds} ${exited}`, t('End it')))) return;
      const answer = await this.#api.post<Ended | null>('terminate', { pid, started });
      if (answer?.ended !== false) return;
      const still = t('It was asked to end, and still runs.');
      if (!(await confirm(t('Kill the process?'), `${holds} ${still}`, t('Kill it')))) return;
      const body = { pid, started, force: true };
      const last = await this.#api.post<Ended | null>('terminate', body);
      if (last?.ended === false && last.message) Notification.warning(last.message);
    });

  /** Show an alert; notifications take no focus. */
  notify({ key, kind, text, process }: Alert, show: () => void): void {
    const t = this.#t;
    const actions: Notification.IAction[] = [];
    if (process) {
      actions.push({ label: t('Go to it'), callback: () => void this.goTo(process) });
      // Only this server's kernels can be shut down from here.
      if (!process.server)
        actions.push({ label: t('Shut down…'), callback: () => void this.shutDown(process) });
    } else actions.push({ label: t('Show the GPUs'), callback: show });
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

  async #session(process: ProcessSample) {
    const { sessions } = this.#app.serviceManager;
    await sessions.refreshRunning();
    return [...sessions.running()].find((one) => one.kernel?.id === process.kernel);
  }

  /** Return the memory on all GPUs, including the other processes of its kernel. */
  #memory({ pid, kernel, orphan }: ProcessSample): string {
    const all = this.#latest()?.processes.filter((one) =>
      kernel && !orphan ? one.kernel === kernel && !one.orphan : one.pid === pid,
    );
    const known = all?.flatMap(({ memory }) => (memory === null ? [] : [memory])) ?? [];
    if (!known.length) return this.#t('GPU memory');
    return size(known.reduce((sum, bytes) => sum + bytes));
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

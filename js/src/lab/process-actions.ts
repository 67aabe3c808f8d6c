/** Act on a process from the panel or from an alert; ask before anything ends. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { KernelAPI } from '@jupyterlab/services';
import type { Actions, Translate } from '../monitor/shared.js';
import { size } from '../monitor/units.js';
import type { ProcessSample, Snapshot } from '../snapshot.js';
import type { Alert } from './alerts.js';
import type { Api } from './server.js';

export class Kernels {
  #app: JupyterFrontEnd;
  #api: Api;
  #t: Translate;
  #latest: () => Snapshot | null;

  constructor(app: JupyterFrontEnd, api: Api, t: Translate, latest: () => Snapshot | null) {
    this.#app = app;
    this.#api = api;
    this.#t = t;
    this.#latest = latest;
  }

  /** For the monitor, which calls them as they are; `look` is the host's. */
  actions(look: () => void): Actions {
    return {
      goTo: (process) => this.goTo(process),
      interrupt: (process) => this.interrupt(process),
      shutDown: (process) => this.shutDown(process),
      terminate: (process) => this.terminate(process),
      look,
    };
  }

  /** Opens the notebook or console; that of another server in a tab of its own. */
  goTo(process: ProcessSample): void {
    void this.#try(async () => {
      const { server, notebook } = process;
      if (server) {
        const path = notebook
          ? `lab/tree/${notebook.split('/').map(encodeURIComponent).join('/')}`
          : '';
        window.open(`${server.replace(/\/*$/, '/')}${path}`, '_blank', 'noopener');
        return;
      }
      const session = await this.#session(process);
      const path = session?.path ?? notebook;
      const command = session?.type === 'console' ? 'console:open' : 'docmanager:open';
      if (!path) throw new Error(this.#t('No notebook of this kernel is known.'));
      await this.#app.commands.execute(command, { path, activate: true });
    });
  }

  interrupt(process: ProcessSample): void {
    const { kernel } = process;
    if (kernel)
      void this.#try(() =>
        KernelAPI.interruptKernel(kernel, this.#app.serviceManager.serverSettings),
      );
  }

  shutDown(process: ProcessSample): void {
    const { kernel } = process;
    if (!kernel) return;
    void this.#try(async () => {
      const session = await this.#session(process);
      const name = process.notebook ?? session?.path ?? this.#name(process);
      const sure = await this.#ask(
        this.#t('Shut down the kernel?'),
        this.#t('%1 holds %2. Its variables will be lost.', name, this.#memory(process)),
        this.#t('Shut down'),
      );
      if (!sure) return;
      const { sessions, kernels } = this.#app.serviceManager;
      await (session ? sessions.shutdown(session.id) : kernels.shutdown(kernel));
    });
  }

  /** Asked to end first; killed only where that did not help, and a person says so. */
  terminate(process: ProcessSample): void {
    const { pid, started } = process;
    const held = this.#t('%1 holds %2.', this.#name(process), this.#memory(process));
    void this.#try(async () => {
      const gone = this.#t('Its kernel is gone, and it still runs.');
      const end = this.#t('End it');
      if (!(await this.#ask(this.#t('End the process?'), `${held} ${gone}`, end))) return;
      const answer = await this.#api.post('terminate', { pid, started });
      if ((answer as { ended?: boolean } | null)?.ended !== false) return;
      const still = this.#t('It was asked to end, and still runs.');
      const kill = this.#t('Kill it');
      if (!(await this.#ask(this.#t('Kill the process?'), `${held} ${still}`, kill))) return;
      const last = await this.#api.post('terminate', { pid, started, force: true });
      const { ended, message } = (last ?? {}) as { ended?: boolean; message?: string };
      if (ended === false && message) Notification.warning(message);
    });
  }

  async #session(process: ProcessSample) {
    const { sessions } = this.#app.serviceManager;
    await sessions.refreshRunning();
    return [...sessions.running()].find((one) => one.kernel?.id === process.kernel);
  }

  #name = (process: ProcessSample) => `${process.name ?? ''} (pid ${process.pid})`.trim();

  /** Over all GPUs, and of its kernel's other processes too. */
  #memory({ pid, kernel, orphan }: ProcessSample): string {
    const all = this.#latest()?.processes.filter((one) =>
      kernel && !orphan ? one.kernel === kernel && !one.orphan : one.pid === pid,
    );
    const known = all?.flatMap(({ memory }) => (memory === null ? [] : [memory])) ?? [];
    if (!known.length) return this.#t('GPU memory');
    return size(known.reduce((sum, bytes) => sum + bytes));
  }

  async #ask(title: string, body: string, label: string): Promise<boolean> {
    const buttons = [Dialog.cancelButton(), Dialog.warnButton({ label })];
    return (await showDialog({ title, body, buttons, defaultButton: 0 })).button.accept;
  }

  /** A failure is told in a line; it is nobody's programming error. */
  async #try(what: () => Promise<unknown>): Promise<void> {
    try {
      await what();
    } catch (error) {
      Notification.error(error instanceof Error ? error.message : String(error));
    }
  }
}

/** A fault stays until it is read; the rest goes by itself and is kept in the list. */
const SHOWN_MS = 20_000;

/** What is shown of faults, by the alert's key: it goes when they are over. */
const shown = new Map<string, string>();

export function notify(alert: Alert, kernels: Kernels, t: Translate, show: () => void): void {
  const { process } = alert;
  const offers: Notification.IAction[] = [];
  if (process) {
    offers.push({ label: t('Go to it'), callback: () => kernels.goTo(process) });
    // A kernel of another server is not this one's to end.
    if (!process.server)
      offers.push({ label: t('Shut down…'), callback: () => kernels.shutDown(process) });
  } else offers.push({ label: t('Show the GPUs'), callback: show });
  const fault = alert.kind === 'fault';
  const id = Notification.emit(alert.text, fault ? 'error' : 'warning', {
    autoClose: fault ? false : SHOWN_MS,
    actions: offers,
  });
  if (fault) shown.set(alert.key, id);
}

/** What was told of is over. */
export function dismiss(key: string): void {
  const id = shown.get(key);
  if (id !== undefined) Notification.dismiss(id);
  shown.delete(key);
}

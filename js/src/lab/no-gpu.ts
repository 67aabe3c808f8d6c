/** Run the doctor, and offer virtual GPUs, if there is no GPU. */

import type { ISessionContext } from '@jupyterlab/apputils';
import type { Offer, State, Translate } from '../monitor/shared.js';
import type { Check, Snapshot } from '../snapshot.js';
import type { RunInKernel } from './run-in-kernel.js';
import type { Api } from './server.js';

/** Requests the doctor's checks: without a GPU by itself, else on request. */
export class DoctorClient {
  #api: Pick<Api, 'get'>;
  #set: (state: Partial<State>) => void;
  #show: (snapshot: Snapshot) => void;
  /** The problems at the last automatic request; null if there was none. */
  #problems: string | null = null;
  #requested = false;

  /** `set` gets the checks, and `show` new snapshots. */
  constructor(
    api: Pick<Api, 'get'>,
    set: (state: Partial<State>) => void,
    show: (snapshot: Snapshot) => void,
  ) {
    [this.#api, this.#set, this.#show] = [api, set, show];
  }

  /** Request the checks if there is no GPU and the problems have changed. */
  snapshot({ gpus, problems }: Snapshot): void {
    if (gpus.length > 0) {
      if (this.#problems !== null) this.#set({ checks: null });
      this.#problems = null;
      return;
    }
    const codes = problems.map(({ code }) => code).join();
    if (codes === this.#problems) return;
    this.#problems = codes;
    void this.ask();
  }

  /** Show the checks, or hide them if they are visible and there are GPUs. */
  async toggle(isVisible: boolean): Promise<void> {
    this.#requested = !(this.#requested && isVisible && this.#problems === null);
    if (this.#requested) await this.ask();
    else this.#set({ checks: null });
  }

  async ask(): Promise<void> {
    try {
      const checks = await this.#api.get<Check[]>('doctor');
      if (checks.length) this.#set({ checks });
    } catch {
      // The connection's line says what is wrong. The next snapshot asks again.
      this.#problems = null;
    }
  }

  /** Request a new snapshot and the checks. */
  async again(): Promise<void> {
    const snapshot = await this.#api.get<Snapshot>('snapshot').catch(() => null);
    if (snapshot) this.#show(snapshot);
    await this.ask();
  }
}

const VIRTUAL = ['%load_ext gpumagic', '%gpus --virtual 2'];
// The kernel knows the IPython profile of its user.
const ENABLE = ['from gpumagic.magics import every_notebook', 'print(every_notebook.enable())'];

/** Offers virtual GPUs in a notebook, and gpumagic in every notebook. */
export class Offers {
  #kernels: Pick<RunInKernel, 'run'>;
  #set: (state: { offer: Offer }) => void;
  #done: (text: string) => void;
  #t: Translate;
  #context: ISessionContext | null = null;
  #text = '';
  #busy = false;

  /** `done` gets a result that must be visible even if the offer is gone by then. */
  constructor(
    kernels: Pick<RunInKernel, 'run'>,
    set: (state: { offer: Offer }) => void,
    done: (text: string) => void,
    t: Translate,
  ) {
    [this.#kernels, this.#set, this.#done, this.#t] = [kernels, set, done, t];
    this.#show();
  }

  /** Change the current notebook or console. */
  here(context: ISessionContext | null): void {
    if (context !== this.#context && !this.#busy) this.#text = '';
    this.#context = context;
    this.#show();
  }

  /** Make two virtual GPUs in the current notebook, or in a new one. Throws the reason if not. */
  async virtual(): Promise<void> {
    const t = this.#t;
    const name = this.#context?.name ?? t('a new notebook');
    await this.#run(t('Making 2 virtual GPUs in %1…', name), async () => {
      const { notebook } = await this.#kernels.run(this.#context, VIRTUAL);
      const now = t('%1 now has 2 virtual GPUs, until its kernel stops.', notebook);
      this.#done(`${now} ${t('Try %1 on top of a cell.', '%%ongpu 1')}`);
      return '';
    });
  }

  /** Load gpumagic in every notebook with its first magic. Throws the reason if not. */
  async enable(): Promise<void> {
    const t = this.#t;
    if (!this.#context) throw new Error(t('Open a notebook first: its kernel does this.'));
    await this.#run(t('Writing IPython’s settings…'), async () => {
      const { printed } = await this.#kernels.run(this.#context, ENABLE);
      return `${printed.charAt(0).toUpperCase()}${printed.slice(1)}.`;
    });
  }

  async #run(progress: string, act: () => Promise<string>): Promise<void> {
    if (this.#busy) return;
    this.#busy = true;
    this.#text = progress;
    this.#show();
    try {
      this.#text = await act();
    } catch (error) {
      this.#text = error instanceof Error ? error.message : String(error);
      throw error;
    } finally {
      this.#busy = false;
      this.#show();
    }
  }

  #show(): void {
    const t = this.#t;
    const name = this.#context?.name;
    // The panel shows the reason of a failure in the place of the buttons.
    const press = (act: () => Promise<void>) => () => void act().catch(() => {});
    const virtual = {
      label: name ? t('Use 2 virtual GPUs in %1', name) : t('New notebook with 2 virtual GPUs'),
      title: t('Runs %1 in its kernel. They end with the kernel.', VIRTUAL.join(', ')),
      press: press(() => this.virtual()),
    };
    const every = {
      label: t('Load gpumagic in every notebook'),
      title: t('New kernels load it with its first magic. To undo: gpumagic disable'),
      press: press(() => this.enable()),
    };
    const buttons = name ? [virtual, every] : [virtual];
    this.#set({ offer: { text: this.#text, busy: this.#busy, buttons } });
  }
}

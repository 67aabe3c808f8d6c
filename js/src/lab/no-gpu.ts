/** Run the doctor, and offer virtual GPUs, if there is no GPU. */

import type { ISessionContext } from '@jupyterlab/apputils';
import type { Translate } from '../monitor/shared.js';
import type { Check, Snapshot } from '../snapshot.js';
import type { Cells } from './cells.js';
import type { Feeds } from './feeds.js';
import type { Api } from './server.js';
import type { Stream } from './stream.js';

/** Requests the doctor's checks: without a GPU by itself, else on request. */
export class DoctorClient {
  #api: Pick<Api, 'get'>;
  #feeds: Pick<Feeds, 'set'>;
  #stream: Pick<Stream, 'show'>;
  /** The problems at the last automatic request; null if there are GPUs. */
  #problems: string | null = null;
  #shown = false;

  constructor(api: Pick<Api, 'get'>, feeds: Pick<Feeds, 'set'>, stream: Pick<Stream, 'show'>) {
    [this.#api, this.#feeds, this.#stream] = [api, feeds, stream];
  }

  /** Request the checks if there is no GPU and the problems have changed. */
  snapshot({ gpus, problems }: Snapshot): void {
    if (gpus.length > 0) {
      if (this.#problems !== null) this.#show(null);
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
    if (this.#shown && isVisible && this.#problems === null) this.#show(null);
    else await this.ask();
  }

  async ask(): Promise<void> {
    try {
      this.#show(await this.#api.get<Check[]>('doctor'));
    } catch {
      // The connection's line says what is wrong. The next snapshot asks again.
      this.#problems = null;
    }
  }

  /** Request a new snapshot and the checks. */
  async again(): Promise<void> {
    const snapshot = await this.#api.get<Snapshot>('snapshot').catch(() => null);
    if (snapshot) this.#stream.show(snapshot);
    await this.ask();
  }

  #show(checks: Check[] | null): void {
    this.#shown = checks !== null;
    this.#feeds.set({ checks });
  }
}

const VIRTUAL = ['%load_ext gpumagic', '%gpus --virtual 2'];
// The kernel knows the IPython profile of its user.
const ENABLE = ['from gpumagic.magics import loading', 'print(loading.enable())'];

/** Offers virtual GPUs in a notebook, and gpumagic in every notebook. */
export class Offers {
  #cells: Pick<Cells, 'run' | 'runFirst'>;
  #feeds: Pick<Feeds, 'set'>;
  #done: (text: string) => void;
  #trans: Translate;
  #context: ISessionContext | null = null;
  #text = '';
  #busy = false;

  /** `done` gets a result that must be visible even if the offer is gone by then. */
  constructor(
    cells: Pick<Cells, 'run' | 'runFirst'>,
    feeds: Pick<Feeds, 'set'>,
    done: (text: string) => void,
    trans: Translate,
  ) {
    [this.#cells, this.#feeds, this.#done, this.#trans] = [cells, feeds, done, trans];
    this.#show();
  }

  /** Change the current notebook or console. */
  setCurrent(context: ISessionContext | null): void {
    if (context !== this.#context && !this.#busy) this.#text = '';
    this.#context = context;
    this.#show();
  }

  /** Make two virtual GPUs in a first cell of the current notebook, or of a new one. */
  async virtual(): Promise<void> {
    const trans = this.#trans;
    const name = this.#context?.name ?? trans.__('a new notebook');
    await this.#run(trans.__('Making 2 virtual GPUs in %1…', name), async () => {
      const notebook = await this.#cells.runFirst(this.#context, VIRTUAL);
      const now = trans.__('%1 now has 2 virtual GPUs, until its kernel stops.', notebook);
      this.#done(`${now} ${trans.__('Type %1 at the top of a cell.', '%%ongpu 1')}`);
      return '';
    });
  }

  /** Load gpumagic in every notebook with its first magic. Throws the reason if not. */
  async enable(): Promise<void> {
    const trans = this.#trans;
    const context = this.#context;
    if (!context)
      throw new Error(trans.__('Open a notebook first: its kernel writes the settings.'));
    await this.#run(trans.__('Writing IPython’s settings…'), async () => {
      const printed = await this.#cells.run(context, ENABLE);
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
    const trans = this.#trans;
    const name = this.#context?.name;
    // The panel shows the reason of a failure instead of the buttons.
    const press = (act: () => Promise<void>) => () => void act().catch(() => {});
    const virtual = {
      label: name
        ? trans.__('Use 2 virtual GPUs in %1', name)
        : trans.__('New notebook with 2 virtual GPUs'),
      title: trans.__(
        'Runs %1 in its first cell. The virtual GPUs end with the kernel.',
        VIRTUAL.join(', '),
      ),
      press: press(() => this.virtual()),
    };
    const every = {
      label: trans.__('Load gpumagic in every notebook'),
      title: trans.__('New kernels load it with its first magic. To undo: gpumagic disable'),
      press: press(() => this.enable()),
    };
    const buttons = name ? [virtual, every] : [virtual];
    this.#feeds.set({ offer: { text: this.#text, busy: this.#busy, buttons } });
  }
}

/** Ask the doctor, and offer virtual GPUs, where there is no GPU. */

import type { ISessionContext } from '@jupyterlab/apputils';
import type { Monitor } from '../monitor/monitor.js';
import type { Translate } from '../monitor/shared.js';
import type { Snapshot } from '../snapshot.js';
import { toChecks, toSnapshot } from './audience.js';
import type { Lines } from './run-in-kernel.js';
import type { Api } from './server.js';

export class Doctor {
  #api: Pick<Api, 'get'>;
  #monitor: Pick<Monitor, 'diagnose'>;
  #found: (snapshot: Snapshot) => void;
  /** What was wrong when the doctor was last asked without being called; null: not so asked. */
  #asked: string | null = null;
  #called = false;

  constructor(
    api: Pick<Api, 'get'>,
    monitor: Pick<Monitor, 'diagnose'>,
    found: (snapshot: Snapshot) => void,
  ) {
    this.#api = api;
    this.#monitor = monitor;
    this.#found = found;
  }

  /** Asks again whenever something else is wrong. */
  snapshot(snapshot: Snapshot): void {
    if (snapshot.gpus.length > 0) {
      if (this.#asked !== null) this.#monitor.diagnose(null);
      this.#asked = null;
      return;
    }
    const wrong = snapshot.problems.map((problem) => problem.code).join();
    if (wrong === this.#asked) return;
    this.#asked = wrong;
    void this.ask();
  }

  /** A person calls; called again where it `isSeen`, it goes. */
  async call(isSeen: boolean): Promise<void> {
    this.#called = !(this.#called && isSeen && this.#asked === null);
    if (this.#called) await this.ask();
    else this.#monitor.diagnose(null);
  }

  async ask(): Promise<void> {
    try {
      const checks = toChecks(await this.#api.get('doctor'));
      if (checks.length) this.#monitor.diagnose(checks);
    } catch {
      // The connection's own line says what is wrong; the next look asks again.
      this.#asked = null;
    }
  }

  /** The machine and the doctor once more, without waiting for the next look. */
  async again(): Promise<void> {
    const snapshot = await this.#api.get('snapshot').then(toSnapshot, () => null);
    if (snapshot) this.#found(snapshot);
    await this.ask();
  }
}

const VIRTUAL = ['%load_ext gpumagic', '%gpus --virtual 2'];
// In the kernel, which knows its user's profile of IPython.
const ENABLE = ['from gpumagic.magics import every_notebook', 'print(every_notebook.enable())'];

export class Offers {
  #lines: Pick<Lines, 'run'>;
  #monitor: Pick<Monitor, 'offer'>;
  #told: (text: string) => void;
  #t: Translate;
  #context: ISessionContext | null = null;
  #said = '';
  #busy = false;

  /** `told` hears of what is done while the offer may have gone from the panel. */
  constructor(
    lines: Pick<Lines, 'run'>,
    monitor: Pick<Monitor, 'offer'>,
    told: (text: string) => void,
    t: Translate,
  ) {
    this.#lines = lines;
    this.#monitor = monitor;
    this.#told = told;
    this.#t = t;
    this.#tell();
  }

  /** The current notebook or console. */
  here(context: ISessionContext | null): void {
    if (context !== this.#context && !this.#busy) this.#said = '';
    this.#context = context;
    this.#tell();
  }

  /** Two virtual GPUs in the current notebook, or in a new one; raises what stands against it. */
  async virtual(): Promise<void> {
    const t = this.#t;
    const name = this.#context?.name ?? t('a new notebook');
    await this.#while(t('Making 2 virtual GPUs in %1…', name), async () => {
      const { notebook } = await this.#lines.run(this.#context, VIRTUAL);
      const [load, make] = VIRTUAL as [string, string];
      this.#told(
        t('%1 has 2 virtual GPUs until its kernel ends (by %2, %3).', notebook, load, make),
      );
      return '';
    });
  }

  /** Lets the first magic of any notebook load the extension; raises what stands against it. */
  async enable(): Promise<void> {
    const t = this.#t;
    if (!this.#context) throw new Error(t('Open a notebook first: it is done in its kernel.'));
    await this.#while(t('Writing IPython’s settings…'), async () => {
      const { printed } = await this.#lines.run(this.#context, ENABLE);
      return `${printed.charAt(0).toUpperCase()}${printed.slice(1)}.`;
    });
  }

  async #while(doing: string, act: () => Promise<string>): Promise<void> {
    if (this.#busy) return;
    this.#busy = true;
    this.#said = doing;
    this.#tell();
    try {
      this.#said = await act();
    } catch (error) {
      this.#said = error instanceof Error ? error.message : String(error);
      throw error;
    } finally {
      this.#busy = false;
      this.#tell();
    }
  }

  #tell(): void {
    const t = this.#t;
    const name = this.#context?.name;
    // What stands against it is told in the panel, where the button was.
    const press = (act: () => Promise<void>) => () => void act().catch(() => {});
    const every = {
      label: t('Load gpumagic in every notebook'),
      hint: t('The first %gpus or %%ongpu then loads it; gpumagic disable takes this back.'),
      press: press(() => this.enable()),
    };
    this.#monitor.offer({
      said: this.#said,
      busy: this.#busy,
      buttons: [
        {
          label: name ? t('Use 2 virtual GPUs in %1', name) : t('New notebook with 2 virtual GPUs'),
          hint: t('Runs %1 in its kernel; they end with it.', VIRTUAL.join(', ')),
          press: press(() => this.virtual()),
        },
        ...(name ? [every] : []),
      ],
    });
  }
}

/** What is offered where there is no GPU: virtual ones in a notebook, and the magics in all. */

import type { ISessionContext } from '@jupyterlab/apputils';
import type { Monitor } from '../monitor/monitor.js';
import type { Translate } from '../monitor/shared.js';
import type { Lines } from './lines.js';

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

/** The line on top: the machine, the connection, and what the reader can choose. */

import type { Snapshot } from '../snapshot.js';
import { Field, h, icon, show } from './dom.js';
import type { Density, Shared } from './shared.js';
import { filled, reading } from './units.js';

const ICONS = {
  cards: 'M2.500 3h11v4h-11zM2.500 9h11v4h-11z',
  lines: 'M2.500 4h11M2.500 8h11M2.500 12h11',
  page: 'M9 3h4v4M13 3l-5 5M7 4h-4v9h9v-4',
};

export class Toolbar {
  readonly node: HTMLElement;
  readonly state = new Field('span', 'state dim');
  #host = new Field('span', 'host dim');
  #shared: Shared;
  #density: [Density, HTMLButtonElement][];
  #choice: HTMLElement;

  /** `chosen` gets what the reader presses. */
  constructor(shared: Shared, chosen: (density: Density) => void) {
    const { t, actions } = shared;
    this.#shared = shared;
    this.state.node.setAttribute('role', 'status');
    const button = (path: string, title: string, pressed: () => void): HTMLButtonElement => {
      const made = h('button', 'tool', icon(path));
      made.type = 'button';
      made.title = made.ariaLabel = title;
      made.addEventListener('click', pressed);
      return made;
    };
    const cards = button(ICONS.cards, t('A card for each GPU'), () => chosen('cards'));
    const lines = button(ICONS.lines, t('A line for each GPU'), () => chosen('lines'));
    this.#density = [
      ['cards', cards],
      ['lines', lines],
    ];
    this.#choice = h('span', 'tools', cards, lines);
    if (actions.page) {
      const page = button(ICONS.page, t('Open as a page'), () => actions.page?.());
      this.#choice.append(page);
    }
    this.node = h('div', 'top', this.#host.node, this.state.node, this.#choice);
    this.update(null, false);
  }

  update(snapshot: Snapshot | null, lines: boolean): void {
    const whole = snapshot?.gpus.length ?? 0;
    show(this.#choice, whole > 0);
    for (const [density, button] of this.#density) {
      const pressed = String((density === 'lines') === lines);
      if (button.ariaPressed !== pressed) button.ariaPressed = pressed;
    }
    if (snapshot) this.#host.offer(this.#caption(snapshot)).hint(this.#driver(snapshot));
  }

  #caption({ host, driver, cuda }: Snapshot): string {
    const { t } = this.#shared;
    const busy = host.cpu_utilization ?? null;
    return (
      [
        host.name,
        cuda ? `CUDA ${cuda}` : driver && t('driver %1', driver),
        busy === null ? '' : `CPU ${reading(busy, '%')}`,
        host.memory_total && `RAM ${filled(host.memory_used, host.memory_total)}`,
      ]
        .filter(Boolean)
        // A number and its unit stay on one line.
        .map((part) => String(part).replaceAll(' ', '\u00a0'))
        .join(' · ')
    );
  }

  #driver({ driver, host }: Snapshot): string {
    const { t } = this.#shared;
    const cores = host.cpu_count ? `${host.cpu_count} CPU${host.cpu_count > 1 ? 's' : ''}` : '';
    return [driver && t('driver %1', driver), cores].filter(Boolean).join(' · ');
  }
}

/** The line on top: the machine, the connection, and what the reader can choose. */

import type { Snapshot } from '../snapshot.js';
import { Field, h, icon, show } from './dom.js';
import { details, machine } from './host.js';
import type { Machines } from './machines.js';
import type { Density, Shared } from './shared.js';

const ICONS = {
  cards: 'M2.500 3h11v4h-11zM2.500 9h11v4h-11z',
  lines: 'M2.500 4h11M2.500 8h11M2.500 12h11',
  page: 'M9 3h4v4M13 3l-5 5M7 4h-4v9h9v-4',
};

/** What it has to know of the GPUs. */
type Shown = Pick<Machines, 'count' | 'lines' | 'hosts'>;

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
    this.update(null, { count: 0, lines: false, hosts: [] });
  }

  /** Where there are other hosts, each has its name above its GPUs. */
  update(snapshot: Snapshot | null, { count, lines, hosts }: Shown): void {
    show(this.#choice, count > 0);
    for (const [density, button] of this.#density) {
      const pressed = String((density === 'lines') === lines);
      if (button.ariaPressed !== pressed) button.ariaPressed = pressed;
    }
    if (!snapshot) return;
    const { t } = this.#shared;
    const several = hosts.length > 0;
    const said = several
      ? [t('%1 hosts', hosts.length + 1), t('%1 GPUs', count)]
      : [snapshot.host.name ?? '', ...machine(snapshot, t)];
    this.#host.offer(said.filter(Boolean).join(' · ')).hint(several ? '' : details(snapshot, t));
  }
}

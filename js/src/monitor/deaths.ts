/** Show why kernels died, each on a card that the user dismisses. */

import type { KernelDeath, Snapshot } from '../snapshot.js';
import { button, h, Rows } from './dom.js';
import type { Shared } from './shared.js';

export const DEATHS_CSS = `\
.death{border:1px solid var(--line);border-left:3px solid var(--bad);border-radius:3px;margin:0 0 8px;overflow-wrap:anywhere;padding:5px 8px;position:relative}\
.death b{display:block;padding-right:18px}.death p{padding-top:3px}\
.death .close{line-height:16px;padding:1px 4px;position:absolute;right:3px;top:4px}.death button:hover{background:var(--track)}\
.death .again{margin:5px 8px 2px 0}.death details{display:inline-block;vertical-align:bottom}.death details[open]{display:block}\
`;

class DeathCard {
  readonly node: HTMLElement;

  constructor(death: KernelDeath, { trans, actions, opened }: Shared) {
    const at = new Date(death.time * 1000).toLocaleTimeString([], { timeStyle: 'short' });
    const close = button('close dim', () => opened.set(death.id, false), '✕');
    close.title = close.ariaLabel = trans.__('Dismiss');
    const lines = death.details.map((line) => h('div', 'dim', line));
    this.node = h('li', 'death', h('b', '', `${death.title} · ${at}`), ...lines);
    const go = trans.__('Go to In [%1]', death.count ?? ' ');
    if (actions.goToCell && death.code !== null)
      this.node.append(button('again', () => actions.goToCell?.(death), go));
    const advice = h('summary', '', trans.__('What to do'));
    this.node.append(h('details', '', advice, h('p', '', death.advice)), close);
  }
}

export class Deaths {
  readonly node = h('ul');
  #shared: Shared;
  #cards: Rows<KernelDeath, DeathCard>;

  constructor(shared: Shared) {
    this.#shared = shared;
    this.#cards = new Rows(this.node, (death) => new DeathCard(death, shared));
    this.node.ariaLabel = shared.trans.__('Dead kernels');
  }

  /** Show those that were not dismissed, the newest first. */
  update({ events }: Snapshot): void {
    const shown = events.filter(({ id }) => this.#shared.opened.get(id) !== false).reverse();
    this.#cards.update(shown, ({ id }) => id);
  }
}

/** Show why kernels died, each on a card that the user dismisses, and which kernel may be next. */

import type { KernelDeath, KernelSample, Snapshot } from '../snapshot.js';
import { button, h, Rows } from './dom.js';
import type { Shared } from './shared.js';
import { age, isFull, ram, size } from './units.js';

export const DEATHS_CSS = `\
.death{border:1px solid var(--line);border-left:3px solid var(--bad);border-radius:3px;margin:0 0 8px;overflow-wrap:anywhere;padding:5px 8px;position:relative}\
.death b{display:block;padding-right:18px}.death p{padding-top:3px}\
.death .close{line-height:16px;padding:1px 4px;position:absolute;right:3px;top:4px}.death button:hover{background:var(--track)}\
.death .again{margin:5px 8px 2px 0}.death details{display:inline-block;vertical-align:bottom}.death details[open]{display:block}\
`;

class DeathCard {
  readonly node = h('li', 'death');

  constructor(death: KernelDeath, shared: Shared) {
    const { trans, actions, open, toggled, redraw } = shared;
    const at = new Date(death.time * 1000).toLocaleTimeString([], { timeStyle: 'short' });
    const dismiss = () => {
      open.set(death.id, false);
      toggled();
      redraw();
    };
    const close = button('close dim', dismiss, '✕');
    close.title = close.ariaLabel = trans.__('Dismiss');
    const lines = death.details.map((line) => h('div', 'dim', line));
    this.node.append(h('b', '', `${death.title} · ${at}`), ...lines);
    const go = trans.__('Go to In [%1]', death.count ?? ' ');
    if (actions.goToCell && death.code !== null)
      this.node.append(button('again', () => actions.goToCell?.(death), go));
    const advice = h('summary', '', trans.__('What to do'));
    this.node.append(h('details', '', advice, h('p', '', death.advice)), close);
  }

  update(): void {}
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
  update(deaths: readonly KernelDeath[]): void {
    const shown = deaths.filter(({ id }) => this.#shared.open.get(id) !== false).reverse();
    // What was lost may be known later.
    this.#cards.update(shown, ({ id, details }) => `${id} ${details.at(-1)}`);
  }
}

/** Return the kernel that fills the RAM fastest, and how fast; empty if it is not nearly full. */
export function filling({ host, kernels }: Snapshot, { trans }: Shared): Map<KernelSample, string> {
  const [used, total] = ram(host);
  const [first] = [...(kernels ?? [])].sort((a, b) => (b.growth ?? 0) - (a.growth ?? 0));
  if (!first?.growth || first.growth < 0 || !isFull(host)) return new Map();
  const left = age(((total ?? 0) - (used ?? 0)) / first.growth);
  return new Map([[first, trans.__('+%1/s · full in ~%2', size(first.growth), left)]]);
}

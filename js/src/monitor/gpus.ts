/** The list of GPUs: cards, past eight of them lines, and then also who holds memory over all. */

import type { Snapshot } from '../snapshot.js';
import { names } from './bar.js';
import { Card } from './card.js';
import { h, Rows, show } from './dom.js';
import type { Sight } from './page.js';
import { Processes } from './processes.js';
import type { Shared } from './shared.js';
import { type Parts, type View, views } from './split.js';

/** More than this are lines. */
const CARDS = 8;

export class Gpus {
  readonly node = h('div');
  /** Lines also where there are few. */
  compact = false;
  #shared: Shared;
  #sight: Sight;
  #list: HTMLUListElement | null = null;
  #cards: Rows<View, Card> | null = null;
  #lines = false;
  #held: Processes;
  #holders: HTMLElement;
  #legend = h('div', 'legend');
  #marks: [keyof Parts, HTMLElement][];

  constructor(shared: Shared, sight: Sight) {
    const { t } = shared;
    this.#shared = shared;
    this.#sight = sight;
    this.#held = new Processes(shared, t('Held by'));
    this.#holders = h('section', 'held', h('h2', '', t('Held by')), this.#held.node);
    this.#marks = Object.entries(names(shared)).map(([name, text]) => {
      const mark = h('span', '', h('i', `dot ${name}`), h('span', 'dim', text));
      this.#legend.append(mark);
      return [name as keyof Parts, mark];
    });
    this.node.append(this.#holders, this.#legend);
  }

  update(snapshot: Snapshot): void {
    const shown = views(snapshot, this.#shared.here);
    const lines = this.compact || shown.length > CARDS;
    if (!this.#cards || lines !== this.#lines) this.#make(lines);
    this.#cards?.update(shown.map((view) => [view.gpu.uuid, view] as const));
    const unseen = shown.reduce((sum, view) => sum + view.unseen, 0);
    // A card says who holds its memory; of lines one wants to know it of all at once.
    this.#held.update(lines ? snapshot.processes : [], lines ? unseen : 0, true);
    show(this.#holders, lines && (snapshot.processes.length > 0 || unseen > 0));
    for (const [name, mark] of this.#marks)
      show(
        mark,
        shown.some(({ parts }) => parts[name]),
      );
  }

  draw(): void {
    for (const card of this.#cards?.rows ?? []) card.draw();
  }

  dispose(): void {
    this.#cards?.update([]);
  }

  #make(lines: boolean): void {
    this.dispose();
    this.#list?.remove();
    this.#list = h('ul', lines ? 'gpus lines' : 'gpus');
    this.#list.setAttribute('aria-label', this.#shared.t('GPUs'));
    this.node.prepend(this.#list);
    this.#lines = lines;
    this.#cards = new Rows(this.#list, (view) => this.#card(view, lines));
  }

  #card(view: View, lines: boolean): Card {
    const card = new Card(view, lines, this.#shared);
    this.#sight.watch(card.node, (visible) => card.see(visible));
    const dispose = card.dispose.bind(card);
    card.dispose = () => {
      this.#sight.unwatch(card.node);
      dispose();
    };
    return card;
  }
}

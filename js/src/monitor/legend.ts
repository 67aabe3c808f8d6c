/** What the colors of bars and charts stand for. */

import { names } from './bar.js';
import { h, show } from './dom.js';
import type { Shared } from './shared.js';
import { OWNERS, type Owner, type View } from './split.js';

export class Legend {
  readonly node = h('div', 'legend');
  #marks: [Owner, HTMLElement][];

  constructor(shared: Shared) {
    const called = names(shared);
    this.#marks = OWNERS.map((name) => {
      const mark = h('span', '', h('i', `dot ${name}`), h('span', 'dim', called[name]));
      this.node.append(mark);
      return [name, mark];
    });
  }

  /** Only what stands somewhere in these. */
  update(views: readonly View[]): void {
    for (const [name, mark] of this.#marks)
      show(
        mark,
        views.some(({ parts }) => parts[name]),
      );
  }
}

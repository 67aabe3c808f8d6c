/** A few lines at the point of a chart that the pointer or the keyboard is at. */

import { h, parts } from './dom.js';
import type { Spark } from './spark.js';

export class Tip {
  readonly node = h('div', 'tip');
  #within: HTMLElement;

  /** It stays `within` a node. */
  constructor(within: HTMLElement) {
    this.#within = within;
    this.node.hidden = true;
  }

  /** Shows lines of text, `spoken` also read aloud; none hides it. */
  point(at: Spark, lines: string[], spoken: boolean): void {
    const tip = this.node;
    tip.ariaLive = spoken ? 'polite' : 'off';
    tip.hidden = lines.length === 0;
    tip.replaceChildren(...lines.map((line) => h('div', '', ...parts(line))));
    if (tip.hidden) return;
    const all = this.#within.getBoundingClientRect();
    const box = at.node.getBoundingClientRect();
    const across = box.left - all.left + (at.hover ?? 0) - tip.offsetWidth / 2;
    const left = Math.max(4, Math.min(across, all.width - tip.offsetWidth - 4));
    tip.style.transform = `translate(${Math.round(left)}px,${Math.round(box.bottom - all.top + 4)}px)`;
  }
}

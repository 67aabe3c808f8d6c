/** Draw bars: memory by owner, utilization, a measurement, and the legend of their colors. */

import type { TimingBar } from '../snapshot.js';
import { Field, h, show } from './dom.js';
import { OWNERS, type Owner, type Parts, type View } from './owners.js';
import type { Shared } from './shared.js';
import { size } from './units.js';

/** What the owners are called, in every view. */
export function names({ t }: Shared): Record<Owner, string> {
  return {
    mine: t('this notebook'),
    books: t('my other notebooks'),
    others: t('other processes'),
    left: t('left behind'),
    unseen: t('unaccounted'),
    driver: t('driver'),
  };
}

/** "this notebook 10.0 GiB · driver 640 MiB": those who hold something. */
export const told = (parts: Record<Owner, number>, shared: Shared): string[] => {
  const called = names(shared);
  return OWNERS.filter((name) => parts[name] > 0).map(
    (name) => `${called[name]} ${size(parts[name])}`,
  );
};

/** Colored parts of a whole, written when one of them moved by something one can see. */
class Strip {
  readonly node: HTMLElement;
  #columns = '';

  constructor(...css: string[]) {
    this.node = h('span', 'bar', ...css.map((name) => h('i', name)));
  }

  /** Shares from 0 to 1, one for each part. */
  fill(shares: readonly number[]): void {
    let left = 1000;
    let columns = '';
    for (const share of shares) {
      const width = Math.min(Math.max(Math.round(share * 1000), 0), left);
      left -= width;
      columns += `${width / 10}% `;
    }
    // One write for all parts: 64 GPUs have 450 of them.
    if (columns !== this.#columns) this.node.style.gridTemplateColumns = this.#columns = columns;
  }
}

export class ShareBar {
  #strip: Strip;
  readonly node: HTMLElement;

  constructor(css = 'busy') {
    this.#strip = new Strip(css);
    this.node = this.#strip.node;
    // The number beside it says the same.
    this.node.setAttribute('aria-hidden', 'true');
  }

  update(percent: number | null): void {
    this.#strip.fill([(percent ?? 0) / 100]);
  }
}

export class MemoryBar {
  #strip = new Strip(...OWNERS);
  readonly node = this.#strip.node;
  #shared: Shared;
  #spoken: boolean;
  #label = '';
  #parts: Parts | null = null;

  /** `spoken` where nothing beside it tells a screen reader how much is used. */
  constructor(shared: Shared, spoken: boolean) {
    this.#shared = shared;
    this.#spoken = spoken;
    if (spoken) this.node.setAttribute('role', 'img');
    else this.node.setAttribute('aria-hidden', 'true');
    this.node.addEventListener('pointerenter', () => {
      if (this.#parts) this.node.title = this.#words(this.#parts);
    });
  }

  update(parts: Parts, total: number | null): void {
    const whole = parts.known && total ? total : 0;
    this.#parts = parts;
    this.#strip.fill(OWNERS.map((name) => (whole ? parts[name] / whole : 0)));
    if (!this.#spoken) return;
    const label = this.#words(parts);
    if (label !== this.#label) this.node.ariaLabel = this.#label = label;
  }

  #words(parts: Parts): string {
    const { t } = this.#shared;
    if (!parts.known) return t('not known how much is used');
    return [...told(parts, this.#shared), `${t('free')} ${size(parts.free)}`].join(', ');
  }
}

export class Pace {
  #label: string;
  #where = new Field();
  #bar = new ShareBar();
  #text = new Field('span', 'number');
  readonly node = h('div', 'slice pace', this.#where.node, this.#bar.node, this.#text.node);

  /** Called by the device where `label` is empty. */
  constructor(label = '') {
    this.#label = label;
  }

  update(bar: TimingBar | undefined): void {
    show(this.node, !!bar);
    if (!bar) return;
    this.#where.say(this.#label || bar.where);
    this.#bar.update(100 * bar.share);
    this.#text.say(bar.text);
  }
}

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

/** Draw bars: memory by owner, utilization, a measurement; and the legend of their colors. */

import type { TimingBar } from '../snapshot.js';
import { Field, h, show } from './dom.js';
import { OWNERS, type Owner, type Parts, type View } from './owners.js';
import type { Shared } from './shared.js';
import { size } from './units.js';

/** The name of each owner. */
export const ownerNames = ({ t }: Shared): Record<Owner, string> => ({
  own: t('this notebook'),
  ownOther: t('my other notebooks'),
  other: t('other processes'),
  orphan: t('orphaned'),
  unattributed: t('not visible here'),
  reserved: t('driver'),
});

/** "this notebook 10.0 GiB", "driver 640 MiB": the owners that hold something. */
export function describe(parts: Partial<Record<Owner, number>>, shared: Shared): string[] {
  const names = ownerNames(shared);
  return OWNERS.flatMap((name) => (parts[name] ? `${names[name]} ${size(parts[name])}` : []));
}

/** Colored parts of a whole. */
class Strip {
  readonly node: HTMLElement;
  #columns = '';

  constructor(...css: string[]) {
    this.node = h('span', 'bar', ...css.map((name) => h('i', name)));
    this.node.ariaHidden = 'true';
  }

  /** Set the shares from 0 to 1, one for each part. */
  fill(shares: readonly number[]): void {
    let left = 1000;
    let columns = '';
    for (const share of shares) {
      const width = Math.min(Math.max(Math.round(share * 1000), 0), left);
      left -= width;
      columns += `${width / 10}% `;
    }
    // One write for all parts, and only after a visible change: 64 GPUs have 450 parts.
    if (columns !== this.#columns) this.node.style.gridTemplateColumns = this.#columns = columns;
  }
}

export class ShareBar extends Strip {
  constructor(css = 'busy') {
    super(css);
  }

  update(percent: number | null): void {
    this.fill([(percent ?? 0) / 100]);
  }
}

export class MemoryBar extends Strip {
  #shared: Shared;
  #parts: Parts | null = null;

  constructor(shared: Shared) {
    super(...OWNERS);
    this.#shared = shared;
    this.node.addEventListener('pointerenter', () => {
      if (this.#parts) this.node.title = this.#describe(this.#parts);
    });
  }

  update(parts: Parts, total: number | null): void {
    const whole = parts.known && total ? total : 0;
    this.#parts = parts;
    this.fill(OWNERS.map((name) => (whole ? parts[name] / whole : 0)));
  }

  #describe(parts: Parts): string {
    const { t } = this.#shared;
    if (!parts.known) return t('unknown');
    return [...describe(parts, this.#shared), `${t('free')} ${size(parts.free)}`].join(', ');
  }
}

/** A device's bar during or after a measurement. */
export class TimingRow {
  #label: string;
  #where = new Field();
  #bar = new ShareBar();
  #text = new Field('span', 'number');
  readonly node = h('div', 'slice pace', this.#where.node, this.#bar.node, this.#text.node);

  /** The label is the device if it is empty. */
  constructor(label = '') {
    this.#label = label;
  }

  update(bar: TimingBar | undefined): void {
    show(this.node, !!bar);
    if (!bar) return;
    this.#where.text(this.#label || bar.where);
    this.#bar.update(100 * bar.share);
    this.#text.text(bar.text);
  }
}

/** The colors that bars and charts use. */
export class Legend {
  readonly node = h('div', 'legend');
  #marks: [Owner, HTMLElement][];

  constructor(shared: Shared) {
    const names = ownerNames(shared);
    this.#marks = OWNERS.map((name) => {
      const mark = h('span', '', h('i', `dot ${name}`), h('span', 'dim', names[name]));
      this.node.append(mark);
      return [name, mark];
    });
  }

  update(views: readonly View[]): void {
    show(this.node, views.length > 0);
    for (const [name, mark] of this.#marks)
      show(
        mark,
        views.some(({ parts }) => parts[name]),
      );
  }
}

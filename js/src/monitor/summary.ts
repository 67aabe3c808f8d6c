/** All GPUs in one line, and in which order they stand. */

import { Field, h, icon, show } from './dom.js';
import type { Shared } from './shared.js';
import type { View } from './split.js';
import { size } from './units.js';

/** From so many percent on it is busy. */
const BUSY = 5;
/** Up to this share of its memory, an idle one is free. */
const FREE = 0.05;

const SORT =
  'M5 3v10M2.500 10.500l2.500 2.500l2.500-2.500M11 13v-10M8.500 5.500l2.500-2.500l2.500 2.500';
const ORDERS = ['number', 'utilization', 'memory', 'free', 'temperature'] as const;
type Order = (typeof ORDERS)[number];
/** The greatest first; what is not known last. */
const RANK: Record<Order, (view: View) => number | null> = {
  number: () => 0,
  utilization: ({ gpu }) => gpu.utilization,
  memory: ({ gpu }) => gpu.memory_used,
  free: ({ parts }) => (parts.known ? parts.free : null),
  temperature: ({ gpu }) => gpu.temperature,
};

/** "8 GPUs · 6 busy · 1 free · 296 GiB held". */
export function summary(views: readonly View[], { t }: Pick<Shared, 't'>): string {
  const gpus = views.map(({ gpu }) => gpu).filter((gpu) => !gpu.lost);
  const busy = gpus.filter((gpu) => (gpu.utilization ?? 0) >= BUSY);
  const free = gpus.filter(
    ({ utilization, memory_used: used, memory_total: total }) =>
      utilization !== null && utilization < BUSY && used !== null && used <= FREE * (total ?? 0),
  );
  const known = gpus.filter((gpu) => gpu.memory_used !== null);
  const held = known.reduce((sum, gpu) => sum + (gpu.memory_used ?? 0), 0);
  const lost = views.length - gpus.length;
  return [
    t('%1 GPUs', views.length),
    lost ? t('%1 lost', lost) : '',
    t('%1 busy', busy.length),
    t('%1 free', free.length),
    known.length ? t('%1 held', size(held)) : '',
  ]
    .filter(Boolean)
    .join(' · ');
}

export class Summary {
  readonly node: HTMLElement;
  #shared: Shared;
  #text = new Field();
  #order = new Field('span', 'dim');
  #select = h('select');
  #names: Record<Order, string>;

  constructor(shared: Shared, changed: () => void) {
    const { t } = shared;
    this.#names = {
      number: t('by number'),
      utilization: t('by utilization'),
      memory: t('by memory held'),
      free: t('by free memory'),
      temperature: t('by temperature'),
    };
    this.#shared = shared;
    for (const order of ORDERS) {
      const option = h('option', '', this.#names[order]);
      option.value = order;
      this.#select.append(option);
    }
    this.#select.ariaLabel = t('Order of the GPUs');
    this.#select.addEventListener('change', changed);
    const order = h('label', 'order', this.#order.node, icon(SORT), this.#select);
    order.title = t('Order of the GPUs');
    this.node = h('div', 'summary', this.#text.node, order);
  }

  update(views: readonly View[], lines: boolean): void {
    show(this.node, views.length > 1 && lines);
    this.#text.say(summary(views, this.#shared));
    const order = this.#select.value as Order;
    this.#order.say(order === 'number' ? '' : this.#names[order]);
  }

  /** This notebook's first, then in the order that the reader chose. */
  order(views: readonly View[]): View[] {
    const rank = RANK[this.#select.value as Order] ?? RANK.number;
    const least = Number.NEGATIVE_INFINITY;
    return [...views].sort(
      (a, b) =>
        Number(b.parts.mine > 0) - Number(a.parts.mine > 0) ||
        (rank(b) ?? least) - (rank(a) ?? least) ||
        0,
    );
  }
}

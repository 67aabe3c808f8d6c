/** List the GPUs of one host: a line each, this notebook's first. */

import type { ProcessSample, Snapshot } from '../snapshot.js';
import type { Visibility } from './browser.js';
import { Field, h, icon, Rows, show } from './dom.js';
import { GpuRow, type Item } from './gpu-row.js';
import { gpuCount, labelOf } from './names.js';
import type { Overview } from './overview.js';
import { type View, views } from './owners.js';
import { Processes } from './processes.js';
import type { Shared } from './shared.js';

/** Up to so many GPUs stand open. */
const FEW = 3;
/** From this utilization on a GPU is busy, in percent. */
const BUSY = 5;
/** Up to this share of its memory, an idle GPU is free. */
const FREE = 0.05;

const SORT =
  'M5 3v10M2.500 10.500l2.500 2.500l2.500-2.500M11 13v-10M8.500 5.500l2.500-2.500l2.500 2.500';
const ORDERS = ['number', 'utilization', 'memory', 'free', 'temperature'] as const;
type Order = (typeof ORDERS)[number];
/** The sort keys: the greatest first, unknown last. */
const RANK: Record<Order, (view: View) => number | null> = {
  number: () => 0,
  utilization: ({ gpu }) => gpu.utilization,
  memory: ({ gpu }) => gpu.memory_used,
  free: ({ parts }) => (parts.known ? parts.free : null),
  temperature: ({ gpu }) => gpu.temperature,
};

/** "2, 5–7": three and more in a row are a range. */
export function ranges(numbers: readonly string[]): string {
  const runs: string[][] = [];
  for (const one of numbers) {
    const run = runs.at(-1);
    if (run && Number(one) === Number(run.at(-1)) + 1) run.push(one);
    else runs.push([one]);
  }
  return runs
    .map((run) => (run.length > 2 ? `${run[0]}–${run.at(-1)}` : run.join(', ')))
    .join(', ');
}

/** "8 GPUs · free: 2, 5 · 1 lost". */
function summarize(views: readonly View[], { trans, here }: Shared): string {
  const there = views.filter(({ gpu }) => !gpu.lost);
  const free = there.filter(
    ({ gpu: { utilization, memory_used: used, memory_total: total } }) =>
      utilization !== null && utilization < BUSY && used !== null && used <= FREE * (total ?? 0),
  );
  const numbers = free.map((view) => labelOf(view, here).replace(/^cuda:/, ''));
  const lost = views.length - there.length;
  return [
    gpuCount(trans, views.length),
    trans.__('free: %1', ranges(numbers) || trans.__('none')),
    lost ? trans.__('%1 lost', lost) : '',
  ]
    .filter(Boolean)
    .join(' · ');
}

/** All GPUs in a line of text, and the choice of their order. */
class Summary {
  readonly node: HTMLElement;
  #shared: Shared;
  #text = new Field();
  #order = new Field('span', 'dim');
  #select = h('select');

  constructor(shared: Shared, changed: () => void) {
    const { trans } = shared;
    this.#shared = shared;
    const names: Record<Order, string> = {
      number: trans.__('by number'),
      utilization: trans.__('by utilization'),
      memory: trans.__('by memory held'),
      free: trans.__('by free memory'),
      temperature: trans.__('by temperature'),
    };
    for (const order of ORDERS) {
      const option = h('option', '', names[order]);
      option.value = order;
      this.#select.append(option);
    }
    this.#select.addEventListener('change', () => {
      const order = this.#select.value as Order;
      this.#order.text(order === 'number' ? '' : names[order]);
      changed();
    });
    const order = h('label', 'order', this.#order.node, icon(SORT), this.#select);
    this.#select.ariaLabel = order.title = trans.__('Order of the GPUs');
    this.node = h('div', 'summary', this.#text.node, order);
  }

  update(views: readonly View[]): void {
    show(this.node, views.length > FEW);
    this.#text.text(summarize(views, this.#shared));
  }

  /** Return this notebook's GPUs first, then in the chosen order. */
  sort(views: readonly View[]): View[] {
    const rank = RANK[this.#select.value as Order] ?? RANK.number;
    const value = (view: View): number => rank(view) ?? Number.NEGATIVE_INFINITY;
    return [...views].sort(
      (a, b) => Number(b.parts.own > 0) - Number(a.parts.own > 0) || value(b) - value(a) || 0,
    );
  }
}

export class Gpus {
  readonly node = h('div');
  #shared: Shared;
  #summary: Summary;
  #rows: Rows<Item, GpuRow>;
  #processes: Processes;
  #holders: HTMLElement;
  #overview: Overview | null;

  constructor(shared: Shared, visibility: Visibility) {
    const { trans } = shared;
    this.#shared = shared;
    this.#summary = new Summary(shared, () => shared.redraw());
    this.#rows = new Rows(h('ul', 'gpus'), (item) => new GpuRow(item, shared, visibility));
    this.#rows.node.ariaLabel = trans.__('GPUs');
    this.#processes = new Processes(shared, trans.__('Memory holders'));
    this.#holders = h(
      'section',
      'held',
      h('h2', '', trans.__('Memory holders')),
      this.#processes.node,
    );
    this.node.append(this.#summary.node, this.#rows.node, this.#holders);
    this.#overview = shared.extras?.overview?.(shared) ?? null;
    if (this.#overview) this.node.prepend(this.#overview.node);
  }

  /** Show a snapshot; `total` is the number of GPUs on all hosts. */
  update(snapshot: Snapshot, total: number): void {
    const all = views(snapshot, this.#shared.here);
    const few = total <= FEW;
    const own = all.filter(({ parts }) => parts.own > 0).length;
    this.#overview?.update(all);
    this.#summary.update(all);
    const items = (few ? all : this.#summary.sort(all)).map((view) => ({
      view,
      standing: few || (view.parts.own > 0 && own <= FEW),
    }));
    this.#rows.update(items, ({ view }) => view.gpu.uuid, true);
    this.#rows.node.classList.toggle('few', few);
    this.#hold(few ? [] : all);
  }

  draw(): void {
    this.#overview?.draw();
    for (const row of this.#rows.rows) row.draw();
  }

  dispose(): void {
    this.#overview?.dispose();
    this.#rows.update([], () => '');
  }

  /** List the memory holders of all GPUs, which closed lines do not show. */
  #hold(all: readonly View[]): void {
    const processes: ProcessSample[] = all.flatMap(({ processes, migs }) => [
      ...migs.flatMap((mig) => mig.processes),
      ...processes,
    ]);
    const system = all.reduce((sum, view) => sum + view.system, 0);
    this.#processes.update(processes, system, true);
    show(this.#holders, processes.length > 0 || system > 0);
  }
}

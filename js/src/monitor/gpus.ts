/** List the GPUs of one host: a line each, this notebook's first. */

import type { Snapshot } from '../snapshot.js';
import type { Visibility } from './browser.js';
import { Field, h, Rows } from './dom.js';
import { GpuRow, type Item } from './gpu-row.js';
import { gpuCount, labelOf } from './names.js';
import { Notebooks } from './notebooks.js';
import type { Overview } from './overview.js';
import { type View, views } from './owners.js';
import type { Shared } from './shared.js';

/** Up to so many GPUs stand open. */
const FEW = 3;
/** From this utilization on a GPU is busy, in percent. */
const BUSY = 5;
/** Up to this share of its memory, an idle GPU is free. */
const FREE = 0.05;

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
  // A virtual GPU is no use to another notebook.
  const real = there.filter(({ gpu }) => !gpu.virtual);
  const free = real.filter(
    ({ gpu: { utilization, memory_used: used, memory_total: total } }) =>
      utilization !== null && utilization < BUSY && used !== null && used <= FREE * (total ?? 0),
  );
  const numbers = free.map((view) => labelOf(view, here).replace(/^cuda:/, ''));
  const lost = views.length - there.length;
  return [
    gpuCount(trans, views.length),
    real.length ? trans.__('free: %1', ranges(numbers) || trans.__('none')) : '',
    lost ? trans.__('%1 lost', lost) : '',
  ]
    .filter(Boolean)
    .join(' · ');
}

export class Gpus {
  readonly node = h('div');
  readonly notebooks: Notebooks;
  #shared: Shared;
  #summary = new Field('div', 'summary');
  #rows: Rows<Item, GpuRow>;
  #overview: Overview | null;

  constructor(shared: Shared, visibility: Visibility) {
    const { trans } = shared;
    this.#shared = shared;
    this.#rows = new Rows(h('ul', 'gpus'), (item) => new GpuRow(item, shared, visibility));
    this.#rows.node.ariaLabel = trans.__('GPUs');
    this.notebooks = new Notebooks(shared);
    this.node.append(this.#summary.node, this.#rows.node);
    this.#overview = shared.extras?.overview?.(shared) ?? null;
    if (this.#overview) this.node.prepend(this.#overview.node);
  }

  /** Show a snapshot; `total` is the number of GPUs on all hosts. */
  update(snapshot: Snapshot, total: number): void {
    const all = views(snapshot, this.#shared.here);
    const few = total <= FEW;
    const own = all.filter(({ parts }) => parts.own > 0).length;
    this.#overview?.update(all);
    this.#summary.textOrHide(all.length > FEW ? summarize(all, this.#shared) : '');
    const items = all.map((view) => ({
      view,
      standing: few || (view.parts.own > 0 && own <= FEW),
    }));
    // This notebook's first.
    const rank = ({ view }: Item): number => Number(view.parts.own > 0);
    if (!few) items.sort((a, b) => rank(b) - rank(a));
    this.#rows.update(items, ({ view }) => view.gpu.uuid, true);
    this.#rows.node.classList.toggle('few', few);
    this.notebooks.update(snapshot, all);
  }

  draw(): void {
    this.#overview?.draw();
    for (const row of this.#rows.rows) row.draw();
  }

  dispose(): void {
    this.#overview?.dispose();
    this.#rows.update([], () => '');
  }
}

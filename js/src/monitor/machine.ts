/** Show one host: its name and load, its problems, its notebooks, and a line for each GPU. */

import type { OtherHost } from '../snapshot.js';
import { Load } from './bars.js';
import { Problems } from './doctor.js';
import { Field, h, Rows, show } from './dom.js';
import { type GpuItem, GpuRow } from './gpu-row.js';
import { broken, drivers, gpuCount, labelOf } from './names.js';
import { Notebooks } from './notebooks.js';
import { type View, views } from './owners.js';
import type { Part, Shared } from './shared.js';
import { age } from './units.js';

/** Up to so many GPUs are open at first. */
export const FEW = 3;
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

export interface MachineItem extends OtherHost {
  /** Whether it is the only host, whose name is no heading. */
  alone: boolean;
  /** Whether the GPUs of all hosts are few. */
  few: boolean;
}

export class Machine {
  readonly node: HTMLElement;
  #shared: Shared;
  #parts: readonly Part[];
  #name = new Field('h2');
  #silent = new Field('span', 'warn');
  #about = new Field('span', 'dim');
  #load = new Load();
  #problems = new Problems();
  #notebooks: Notebooks;
  #summary = new Field('div', 'summary');
  #none: HTMLElement;
  #gpus: Rows<GpuItem, GpuRow>;

  /** `parts`: what JupyterLab's panel shows about the server's host only. */
  constructor(shared: Shared, parts: readonly Part[]) {
    [this.#shared, this.#parts] = [shared, parts];
    const { trans } = shared;
    this.#notebooks = new Notebooks(shared);
    this.#none = h('p', 'dim', trans.__('No GPU is visible here.'));
    this.#gpus = new Rows(h('ul', 'gpus'), (item) => new GpuRow(item, shared));
    this.#gpus.node.ariaLabel = trans.__('GPUs');
    const head = [this.#name, this.#silent, this.#about, this.#load].map(({ node }) => node);
    const body = [this.#problems, ...parts, this.#notebooks, this.#summary, this.#gpus];
    const nodes = body.map(({ node }) => node);
    this.node = h('section', 'machine', h('div', 'machine-head', ...head), ...nodes, this.#none);
  }

  update({ snapshot, silent, alone, few }: MachineItem): void {
    const { trans, here, extras } = this.#shared;
    const { host, gpus, driver } = snapshot;
    const name = host.name ?? trans.__('a host without a name');
    const label = alone ? '' : trans.__('GPUs of %1', name);
    if ((this.node.ariaLabel ?? '') !== label) this.node.ariaLabel = label;
    this.#name.textOrHide(alone ? '' : name).title(name);
    this.#silent.textOrHide(silent ? trans.__('no answer for %1', age(silent)) : '');
    const about = [alone ? host.name : '', ...drivers(snapshot, trans)].filter(Boolean);
    this.#about.text(about.join(' · ')).title(driver ? trans.__('driver %1', driver) : '');
    this.#load.update(host);
    this.node.classList.toggle('silent', silent > 0);
    // The panel's doctor shows the problems that only explain why there is no GPU.
    this.#problems.update(extras ? broken(snapshot) : snapshot.problems);
    const all = views(snapshot, here);
    for (const part of this.#parts) part.update(snapshot, all);
    this.#notebooks.update(snapshot, all);
    this.#summary.textOrHide(all.length > FEW ? summarize(all, this.#shared) : '');
    show(this.#none, !gpus.length && !this.#parts.length);
    show(this.#gpus.node, gpus.length > 0);
    this.#gpus.update(this.#items(all, few), ({ view }) => view.gpu.uuid, true);
    this.#gpus.node.classList.toggle('few', few);
  }

  /** Return the GPUs; of many, this notebook's come first. */
  #items(all: readonly View[], few: boolean): GpuItem[] {
    const isOwn = ({ parts }: View): boolean => parts.own > 0;
    const own = all.filter(isOwn);
    const sorted = few ? all : [...own, ...all.filter((view) => !isOwn(view))];
    const open = (view: View) => few || (isOwn(view) && own.length <= FEW);
    return sorted.map((view) => ({ view, open: open(view) }));
  }

  draw(): void {
    for (const part of this.#parts) part.draw?.();
    for (const row of this.#gpus.rows) row.draw();
  }
}

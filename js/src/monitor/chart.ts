/** Draw one GPU's chart with its caption, and describe the point under the pointer. */

import type { CellRun, GpuSample } from '../snapshot.js';
import { describe } from './bars.js';
import { Field, h, parts, show } from './dom.js';
import { OWNERS, STRIPED } from './owners.js';
import type { Shared } from './shared.js';
import { type Band, Spark } from './spark.js';
import { age, lasted, NOT_KNOWN, reading, size } from './units.js';

/** "In [12] work/train.ipynb · 12 s · peak 34.2 GiB · mean 87 %". */
function describeRun(run: CellRun, uuid: string, { trans, past, now }: Shared): string {
  const end = run.end ?? now;
  const { peak, mean } = past.stats(uuid, run.start, end);
  const took = lasted(end - run.start);
  return [
    `In [${run.count ?? ' '}] ${run.notebook ?? ''}`.trim(),
    run.end === null ? trans.__('running for %1', took) : took,
    ...(peak === null && mean === null
      ? [trans.__('too short for a sample')]
      : [trans.__('peak %1', size(peak)), trans.__('mean %1', reading(mean, '%'))]),
  ].join(' · ');
}

export class Chart {
  readonly value = new Field('b');
  readonly node: HTMLElement;
  readonly #spark: Spark;
  #shared: Shared;
  #isMemory: boolean;
  #uuid: string;
  #total: number | null = null;
  #reserved = 0;
  /** The run that the keyboard selected. */
  #selected: string | null = null;
  /** The pointer's position in pixels from the left. */
  #pointer: number | null = null;

  constructor(kind: 'utilization' | 'memory', title: string, uuid: string, shared: Shared) {
    this.#shared = shared;
    this.#isMemory = kind === 'memory';
    this.#uuid = uuid;
    this.#spark = new Spark(shared.trans.__('%1 over time', title));
    const canvas = this.#spark.node;
    canvas.addEventListener('pointermove', (event) => {
      this.#pointer = event.offsetX;
      this.draw();
    });
    for (const event of ['pointerleave', 'blur'])
      canvas.addEventListener(event, () => this.#leave());
    canvas.addEventListener('focus', () => this.#select(0));
    canvas.addEventListener('click', () => this.#goTo());
    canvas.addEventListener('keydown', (event) => this.#key(event));
    const caption = h('div', 'cap', h('span', 'dim', title), this.value.node);
    this.node = h('div', 'chart', caption, canvas);
  }

  update(gpu: GpuSample): void {
    // A lost GPU no longer reports its total.
    this.#total = gpu.memory_total ?? this.#total;
    this.#reserved = gpu.memory_reserved ?? this.#reserved;
  }

  draw(): void {
    const { past, now, window, inks } = this.#shared;
    const runs = this.#runs();
    // Time moves on under a resting pointer.
    if (this.#pointer !== null) this.#point(this.#pointer);
    const { node } = this.#spark;
    // Tab stops only at charts with cells.
    if (node.tabIndex !== (runs.length ? 0 : -1)) {
      if (runs.length) node.tabIndex = 0;
      else node.removeAttribute('tabindex');
    }
    const values = this.#values();
    const isMemory = this.#isMemory;
    const drawn = {
      ...{ time: past.time, values, now, window, runs },
      bands: isMemory ? this.#bands(values) : [],
      ink: isMemory ? inks.other : inks.busy,
      from: past.from(now - window),
      top: isMemory ? (this.#total ?? Math.max(1, ...values.filter(Number.isFinite))) : 100,
    };
    this.#spark.draw(drawn, inks);
  }

  #values(): number[] {
    return this.#shared.past.values(this.#uuid, this.#isMemory ? 'memory' : 'utilization');
  }

  /** Return memory by owner over time. */
  #bands(used: readonly number[]): Band[] {
    const { inks, past, here } = this.#shared;
    const owners = past.parts(this.#uuid, here);
    let rest = used.map((bytes) => bytes || 0);
    const bands = OWNERS.flatMap((owner): Band[] => {
      const values = owners.get(owner);
      if (!values) return [];
      // Holders are sampled at other times than the total: clip them to it.
      const held = rest.map((left, n) => Math.min(values[n] ?? 0, left));
      rest = rest.map((left, n) => left - (held[n] ?? 0));
      return [{ values: held, ink: inks[owner], striped: STRIPED.includes(owner) }];
    });
    const system = rest.map((bytes) => bytes + this.#reserved);
    return [...bands, { values: system, ink: inks.system, striped: true }];
  }

  #runs(): CellRun[] {
    const { past, now, window } = this.#shared;
    return past.runs(this.#uuid).filter(({ end }) => end === null || end > now - window);
  }

  #time(across: number): number {
    const { now, window } = this.#shared;
    return now - ((this.#spark.width - across) * window) / this.#spark.width;
  }

  /** Return the last cells at this position. */
  #under(across: number): CellRun[] {
    // Two pixels of tolerance, so that short cells can be hit.
    const [from, to] = [this.#time(across - 2), this.#time(across + 2)];
    const { now } = this.#shared;
    return this.#runs()
      .filter(({ start, end }) => start <= to && from <= (end ?? now))
      .slice(-3);
  }

  /** Describe the cells and the sample at this position. */
  #point(across: number): void {
    const lines = this.#under(across).map((run) => describeRun(run, this.#uuid, this.#shared));
    this.#spark.hover = across;
    this.#spark.node.style.cursor = lines.length && this.#shared.actions.goToCell ? 'pointer' : '';
    this.#shared.tip(this.#spark, [...lines, ...this.#sample(this.#time(across))], false);
  }

  /** Go to the cell under the pointer, or to the selected one. */
  #goTo(): void {
    const run =
      this.#pointer === null
        ? this.#runs().find(({ id }) => id === this.#selected)
        : this.#under(this.#pointer).at(-1);
    if (run) this.#shared.actions.goToCell?.(run);
  }

  #sample(at: number): string[] {
    const { past, now, trans, here } = this.#shared;
    const n = past.nearest(at);
    if (n === null) return [NOT_KNOWN];
    const value = this.#values()[n] ?? Number.NaN;
    const known = Number.isNaN(value) ? null : value;
    const shown = this.#isMemory ? size(known) : reading(known, '%');
    const ago = trans.__('%1, %2 ago', shown, age(now - (past.time[n] as number)));
    if (!this.#isMemory) return [ago];
    const owners = [...past.parts(this.#uuid, here)];
    const parts = Object.fromEntries(owners.map(([owner, values]) => [owner, values[n]]));
    return [ago, ...describe(parts, this.#shared)];
  }

  #key(event: KeyboardEvent): void {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) this.#select(step);
    else if (event.key === 'Escape') this.#leave();
    else if (event.key === 'Enter') this.#goTo();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Select the cell `step` after the selected one; the last one if none is. */
  #select(step: number): void {
    const runs = this.#runs();
    const before = runs.findIndex((run) => run.id === this.#selected);
    const next = before < 0 ? runs.length - 1 : before + step;
    const run = runs[Math.min(Math.max(next, 0), runs.length - 1)];
    if (!run) return;
    this.#selected = run.id;
    const { now, window } = this.#shared;
    const middle = (Math.max(run.start, now - window) + (run.end ?? now)) / 2;
    this.#pointer = null;
    this.#spark.hover = this.#spark.width * (1 - (now - middle) / window);
    this.#shared.tip(this.#spark, [describeRun(run, this.#uuid, this.#shared)], true);
    this.draw();
  }

  #leave(): void {
    this.#selected = this.#pointer = null;
    if (this.#spark.hover === null) return;
    this.#spark.hover = null;
    this.#shared.tip(this.#spark, [], false);
    this.draw();
  }
}

/** A few lines of text at a point of a chart. */
export class Tip {
  readonly node = h('div', 'tip');
  #within: HTMLElement;
  #at: Spark | null = null;

  /** The tip stays inside `within`. */
  constructor(within: HTMLElement) {
    this.#within = within;
    this.node.hidden = true;
  }

  /** Show lines of text; no lines hide it. */
  point(at: Spark, lines: string[], spoken: boolean): void {
    const tip = this.node;
    this.#at = at;
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

  /** Hide it if its chart has been removed. */
  tidy(): void {
    if (!this.#at?.node.isConnected) show(this.node, false);
  }
}

/** Draw one GPU’s chart with its caption, and say what is under the pointer or the keyboard. */

import type { CellRun, GpuSample } from '../snapshot.js';
import { told as toldParts } from './bars.js';
import { Field, h, parts } from './dom.js';
import { OWNERS, type Owner, ownerOf } from './owners.js';
import type { Shared } from './shared.js';
import { type Band, Spark } from './spark.js';
import { age, lasted, NOT_KNOWN, reading, size } from './units.js';

/** "In [12] work/train.ipynb · 12 s · peak 34.2 GiB · mean 87 %". */
export function told(run: CellRun, uuid: string, { t, series, now }: Shared): string {
  const end = run.end ?? now;
  const { peak, mean } = series.stats(uuid, run.start, end);
  return [
    `In [${run.count ?? ' '}] ${run.notebook ?? ''}`.trim(),
    run.end === null ? t('running for %1', lasted(end - run.start)) : lasted(end - run.start),
    ...(peak === null && mean === null
      ? [t('too short for a sample')]
      : [t('peak %1', size(peak)), t('mean %1', reading(mean, '%'))]),
  ].join(' · ');
}

export class Chart {
  readonly value = new Field('b');
  readonly node: HTMLElement;
  readonly spark = new Spark();
  #shared: Shared;
  #kind: 'utilization' | 'memory';
  #uuid: string;
  #total: number | null = null;
  #reserved = 0;
  /** The run that the keyboard stands on. */
  #at: string | null = null;
  /** Where the pointer is, in pixels from the left. */
  #under: number | null = null;

  constructor(kind: 'utilization' | 'memory', title: string, uuid: string, shared: Shared) {
    this.#shared = shared;
    this.#kind = kind;
    this.#uuid = uuid;
    const canvas = this.spark.node;
    canvas.setAttribute('aria-label', shared.t('%1 over time', title));
    canvas.addEventListener('pointermove', (event) => {
      this.#under = event.offsetX;
      this.draw();
    });
    canvas.addEventListener('pointerleave', () => this.#leave());
    canvas.addEventListener('focus', () => this.#step(0));
    canvas.addEventListener('blur', () => this.#leave());
    canvas.addEventListener('keydown', (event) => this.#key(event));
    const caption = h('div', 'cap', h('span', 'dim', title), this.value.node);
    this.node = h('div', 'chart', caption, canvas);
    shared.watch(this.spark);
  }

  update(gpu: GpuSample): void {
    // A GPU that is lost no longer says how much it had.
    this.#total = gpu.memory_total ?? this.#total;
    this.#reserved = gpu.memory_reserved ?? this.#reserved;
  }

  draw(): void {
    const { series, now, window, inks } = this.#shared;
    const runs = this.#runs();
    // What is under the pointer moves on.
    if (this.#under !== null) this.#point(this.#under);
    // Only where there is something to walk through is it worth a stop of the Tab key.
    if (this.spark.node.tabIndex !== (runs.length ? 0 : -1)) {
      if (runs.length) this.spark.node.tabIndex = 0;
      else this.spark.node.removeAttribute('tabindex');
    }
    const values = series.values(this.#uuid, this.#kind);
    const isMemory = this.#kind === 'memory';
    this.spark.draw(
      {
        time: series.time,
        values,
        bands: isMemory ? this.#bands(values) : [],
        ink: isMemory ? inks.driver : inks.busy,
        from: series.from(now - window),
        top: isMemory ? (this.#total ?? most(values)) : 100,
        now,
        window,
        runs,
      },
      inks,
    );
  }

  /** Memory by owner, over time. */
  #bands(used: readonly number[]): Band[] {
    const { inks } = this.#shared;
    const parts = this.#parts();
    let rest = used.map((bytes) => bytes || 0);
    const part = (owner: Owner, values: readonly number[]): Band => {
      // Never more than there is: who holds it was asked a little before, or after.
      const held = rest.map((left, n) => Math.min(values[n] || 0, left));
      rest = rest.map((left, n) => left - (held[n] as number));
      return { values: held, ink: inks[owner] };
    };
    const bands = OWNERS.flatMap((owner) => {
      const values = parts.get(owner);
      return values ? [part(owner, values)] : [];
    });
    const reserved = new Array<number>(used.length).fill(this.#reserved);
    return [...bands, part('unseen', rest), { values: reserved, ink: inks.driver }];
  }

  /** What the holders that are known held, by owner. */
  #parts(): Map<Owner, readonly number[]> {
    const { series, here } = this.#shared;
    const parts = new Map<Owner, readonly number[]>();
    for (const [holder, values] of series.held(this.#uuid)) {
      const owner = ownerOf(holder, here);
      const before = parts.get(owner);
      parts.set(owner, before ? before.map((bytes, n) => (bytes || 0) + (values[n] || 0)) : values);
    }
    return parts;
  }

  dispose(): void {
    this.#leave();
    this.#shared.unwatch(this.spark);
  }

  #runs(): readonly CellRun[] {
    const { runs, now, window } = this.#shared;
    return runs.of(this.#uuid).filter((run) => run.end === null || run.end > now - window);
  }

  #point(across: number): void {
    const { now, window } = this.#shared;
    const second = window / this.spark.width;
    const at = now - (this.spark.width - across) * second;
    // A cell of no length can still be hit.
    const under = this.#runs().filter(
      (run) => run.start - 2 * second <= at && at <= (run.end ?? now) + 2 * second,
    );
    const lines = under.slice(-3).map((run) => told(run, this.#uuid, this.#shared));
    this.spark.hover = across;
    this.#shared.tip(this.spark, [...lines, ...this.#sample(at)], false);
  }

  #sample(at: number): string[] {
    const { series, now, t } = this.#shared;
    const after = series.from(at);
    const before = Math.max(after - 1, 0);
    const [a, b] = [series.time[before] ?? 0, series.time[after] ?? Number.POSITIVE_INFINITY];
    const n = at - a <= b - at ? before : after;
    const time = series.time[n];
    const value = series.values(this.#uuid, this.#kind)[n];
    if (time === undefined || Math.abs(time - at) > 5) return [NOT_KNOWN];
    const known = value === undefined || Number.isNaN(value) ? null : value;
    const shown = this.#kind === 'memory' ? size(known) : reading(known, '%');
    const ago = t('%1, %2 ago', shown, age(now - time));
    if (this.#kind !== 'memory') return [ago];
    const parts = [...this.#parts()].map(([owner, values]) => [owner, values[n] || 0]);
    return [ago, ...toldParts(Object.fromEntries(parts), this.#shared)];
  }

  #key(event: KeyboardEvent): void {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way) this.#step(way);
    else if (event.key === 'Escape') this.#leave();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #step(way: number): void {
    const runs = this.#runs();
    const before = runs.findIndex((run) => run.id === this.#at);
    const from = before < 0 ? runs.length - 1 : before + way;
    const run = runs[Math.min(Math.max(from, 0), runs.length - 1)];
    if (!run) return;
    this.#at = run.id;
    const { now, window } = this.#shared;
    const middle = (Math.max(run.start, now - window) + (run.end ?? now)) / 2;
    const across = this.spark.width * (1 - (now - middle) / window);
    this.#under = null;
    this.spark.hover = across;
    this.#shared.tip(this.spark, [told(run, this.#uuid, this.#shared)], true);
    this.draw();
  }

  #leave(): void {
    this.#at = this.#under = null;
    if (this.spark.hover === null) return;
    this.spark.hover = null;
    this.#shared.tip(this.spark, [], false);
    this.draw();
  }
}

const most = (values: readonly number[]): number =>
  values.reduce((most, value) => (value > most ? value : most), 1);

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

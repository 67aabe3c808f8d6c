/** Draw all GPUs in one chart per metric: a line each, or a row of heat each if there are many. */

import type { Snapshot } from '../snapshot.js';
import { Field, h, Rows, show } from './dom.js';
import { labelOf, ordinalOf } from './names.js';
import type { View } from './owners.js';
import { gap, type Metric } from './past.js';
import type { Shared } from './shared.js';
import { type Axis, type Pen, pieces, Spark, trace } from './spark.js';
import { age, NOT_KNOWN, reading, size } from './units.js';

export const OVERVIEW_CSS = `\
.overview{padding-bottom:10px}.overs{display:grid;gap:10px 20px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}\
.over{min-width:0}.span,.over-head{display:flex;justify-content:space-between}.over-head .dim,.scale{font-size:11px}.span{font-size:10px;line-height:13px}.over canvas{height:110px}\
.keys{display:flex;flex-wrap:wrap;gap:2px 14px;padding-bottom:8px}\
.scale{padding-bottom:6px}.scale i{background:linear-gradient(90deg,transparent,var(--good));border-radius:2px;height:8px;width:80px}\
.keys li,.scale{align-items:center;display:flex;gap:5px}\
`;

/** The most lines that can be told apart. */
const LINES = 8;
/** The step of an arrow key, as a share of the width. */
const STEP = 0.02;
/** What each arrow key adds to the position, in steps across and in lines down. */
const ARROWS: Record<string, [number, number]> = {
  ArrowLeft: [-STEP, 0],
  ArrowRight: [STEP, 0],
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
};

/** The color of each GPU in a line chart; gpumagic/display/plot.py has the same. */
const HUES = [
  '#2f80ed',
  '#55a144',
  '#ba2997',
  '#8f5c2f',
  '#c07e9d',
  '#127a6b',
  '#685f99',
  '#a876f2',
];

/** One GPU in the charts. */
interface Line {
  uuid: string;
  name: string;
  total: number | null;
  own: boolean;
  color: string;
}

/** Return a color for each CUDA ordinal; duplicate or unknown ordinals get a free one. */
function colors(ordinals: readonly (number | null)[]): string[] {
  const taken = new Set<number>();
  const take = (hue: number): number => {
    let free = hue % HUES.length;
    while (taken.has(free) && taken.size < HUES.length) free = (free + 1) % HUES.length;
    taken.add(free);
    return free;
  };
  const first = ordinals.map((ordinal, n) =>
    ordinal !== null && ordinals.indexOf(ordinal) === n ? take(ordinal) : null,
  );
  return first.map((hue) => HUES[hue ?? take(0)] as string);
}

/** The chart of one metric. */
class Overlay {
  readonly node: HTMLElement;
  #spark: Spark;
  #shared: Shared;
  #metric: Metric;
  #format: (value: number) => string;
  #top = new Field('span', 'dim');
  #span = new Field();
  #lines: readonly Line[] = [];
  /** The position of the pointer or the keyboard, as a share of the width and the height. */
  #at: [x: number, y: number] | null = null;

  constructor(metric: Metric, title: string, format: (value: number) => string, shared: Shared) {
    [this.#metric, this.#format, this.#shared] = [metric, format, shared];
    this.#spark = new Spark(shared.trans.__('%1 of all GPUs over time', title));
    const canvas = this.#spark.node;
    canvas.tabIndex = 0;
    canvas.addEventListener('pointermove', ({ offsetX, offsetY }) => {
      this.#point([offsetX / this.#spark.width, offsetY / this.#spark.height]);
    });
    for (const event of ['pointerleave', 'blur'])
      canvas.addEventListener(event, () => this.#point(null));
    canvas.addEventListener('keydown', (event) => this.#key(event));
    const axis = h('div', 'span dim', this.#span.node, h('span', '', shared.trans.__('now')));
    const head = h('div', 'over-head', h('h2', '', title), this.#top.node);
    this.node = h('section', 'over', head, canvas, axis);
  }

  get #many(): boolean {
    return this.#lines.length > LINES;
  }

  update(lines: readonly Line[]): void {
    const { past, window, trans } = this.#shared;
    this.#lines = lines;
    const isKnown = ({ uuid }: Line) => past.values(uuid, this.#metric).some(Number.isFinite);
    show(this.node, lines.some(isKnown));
    this.#span.text(`−${age(window)}`);
    this.#spark.node.style.height = this.#many ? `${Math.max(lines.length * 5, 60) + 4}px` : '';
    this.#top.text(trans.__('up to %1', this.#format(this.#highest())));
  }

  draw(): void {
    if (this.node.hidden) return;
    const { past, now, window, inks } = this.#shared;
    const pen = this.#spark.begin();
    const axis = { time: past.time, from: past.from(now - window), now, window };
    this.#spark.hover = this.#at && this.#at[0] * this.#spark.width;
    if (pen) {
      if (this.#many) this.#drawRows(pen, { ...axis, top: this.#highest() });
      else this.#drawLines(pen, { ...axis, top: this.#highest() });
      this.#spark.cursor(pen, inks.other, this.#spark.height);
    }
    if (this.#at) this.#describe(false);
  }

  #values({ uuid }: Line): readonly number[] {
    return this.#shared.past.values(uuid, this.#metric);
  }

  #drawLines(pen: Pen, axis: Axis): void {
    const scale = this.#spark.scale(axis, 1.5);
    this.#spark.guides(pen, this.#shared.inks.rule, ...[0, axis.top / 2, axis.top].map(scale.y));
    for (const line of this.#lines) {
      const values = this.#values(line);
      pen.strokeStyle = line.color;
      pen.lineWidth = line.own ? 2.25 : 1.25;
      for (const piece of pieces(axis, values)) trace(pen, axis, values, piece, scale);
    }
  }

  /** Draw a row of heat for each GPU: the higher the value, the stronger the color. */
  #drawRows(pen: Pen, axis: Axis): void {
    const { time, from, top } = axis;
    const { inks } = this.#shared;
    const tall = this.#spark.height / this.#lines.length;
    const scale = this.#spark.scale(axis, 0);
    // Neighbors on whole pixels have no seam.
    const x = (at: number): number => Math.round(scale.x(at));
    this.#lines.forEach((line, row) => {
      const values = this.#values(line);
      const most = this.#metric === 'memory' ? (line.total ?? top) : top;
      pen.fillStyle = line.own ? inks.own : inks.busy;
      for (let n = Math.max(from, 1); n < time.length; n++) {
        const value = values[n] as number;
        if (Number.isNaN(value)) continue;
        const end = time[n] as number;
        const start = x(gap(time, n) ? end - 1 : (time[n - 1] as number));
        // 0 differs from unknown.
        pen.globalAlpha = 0.06 + 0.94 * Math.min(value / most, 1);
        pen.fillRect(start, row * tall, Math.max(x(end) - start, 1), Math.max(tall - 1, 1));
      }
    });
    pen.globalAlpha = 1;
  }

  /** Return the value at the top of the chart. */
  #highest(): number {
    if (this.#metric === 'utilization') return 100;
    const totals = this.#metric === 'memory' ? this.#lines.map(({ total }) => total ?? 0) : [];
    if (Math.max(0, ...totals)) return Math.max(...totals);
    const { past, now, window } = this.#shared;
    const from = past.from(now - window);
    const values = this.#lines.flatMap((line) => this.#values(line).slice(from));
    return values.reduce((most, value) => (value > most ? value : most), 0) || 1;
  }

  #key(event: KeyboardEvent): void {
    if (event.key === 'Escape') this.#point(null);
    const step = ARROWS[event.key];
    if (!step) return;
    event.preventDefault();
    const [x, y] = this.#at ?? [1, 0];
    const inside = (value: number): number => Math.min(Math.max(value, 0), 0.999);
    this.#point([inside(x + step[0]), inside(y + step[1] / Math.max(this.#lines.length, 1))]);
    this.#describe(true);
  }

  #point(at: [number, number] | null): void {
    this.#at = at;
    if (!at) this.#shared.tip(this.#spark, [], false);
    this.draw();
  }

  /** Describe each GPU at the time under the pointer; if there are many, the one under it. */
  #describe(spoken: boolean): void {
    if (!this.#at) return;
    const { past, now, window, trans } = this.#shared;
    const [x, y] = this.#at;
    const when = now - window * (1 - x);
    const n = past.nearest(when);
    const row = Math.floor(y * this.#lines.length);
    const lines = this.#many ? this.#lines.slice(row, row + 1) : this.#lines;
    const texts = lines.map((line) => {
      const value = this.#values(line)[n ?? -1] ?? Number.NaN;
      return `${line.name} ${Number.isNaN(value) ? NOT_KNOWN : this.#format(value)}`;
    });
    this.#shared.tip(this.#spark, [trans.__('%1 ago', age(now - when)), ...texts], spoken);
  }
}

/** A GPU's color. */
class Key {
  #dot = h('i', 'dot');
  #name = new Field('span', 'dim');
  readonly node = h('li', '', this.#dot, this.#name.node);

  update({ name, own, color }: Line): void {
    this.#name.text(name).className(own ? 'here' : 'dim');
    this.#dot.style.background = color;
  }
}

export class Overview {
  readonly node: HTMLElement;
  #shared: Shared;
  #charts: Overlay[];
  #keys = new Rows(h('ul', 'keys'), (_: Line) => new Key());
  #scale: HTMLElement;
  #rows = new Field();

  constructor(shared: Shared) {
    const { trans } = shared;
    this.#shared = shared;
    this.#charts = [
      new Overlay('utilization', trans.__('Utilization'), (value) => reading(value, '%'), shared),
      new Overlay('memory', trans.__('Memory'), size, shared),
      new Overlay('power', trans.__('Power'), (value) => reading(value, 'W'), shared),
    ];
    this.#scale = h('p', 'dim scale', this.#rows.node, h('i'), trans.__('most'));
    const charts = h('div', 'overs', ...this.#charts.map(({ node }) => node));
    this.node = h('div', 'overview', this.#keys.node, this.#scale, charts);
  }

  update(_: Snapshot, views: readonly View[]): void {
    const { here, trans } = this.#shared;
    const hues = colors(views.map((view) => ordinalOf(view, here)));
    const lines = views.map((view, n) => ({
      uuid: view.gpu.uuid,
      name: labelOf(view, here),
      total: view.gpu.memory_total,
      own: view.parts.own > 0,
      color: hues[n] as string,
    }));
    const few = lines.length <= LINES;
    show(this.node, lines.length > 0);
    show(this.#keys.node, few && lines.length > 1);
    show(this.#scale, !few);
    const ends = [lines[0]?.name ?? '', lines.at(-1)?.name ?? ''] as const;
    this.#rows.text(trans.__('One row each, %1 to %2: none', ...ends));
    this.#keys.update(few ? lines : [], ({ uuid }) => uuid);
    for (const chart of this.#charts) chart.update(lines);
  }

  draw(): void {
    for (const chart of this.#charts) chart.draw();
  }
}

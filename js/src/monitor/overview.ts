/** Draw all GPUs in one chart for each metric: lines for a few, rows of heat for many. */

import { Field, h, Rows, show } from './dom.js';
import { called, ordinalOf } from './names.js';
import type { View } from './owners.js';
import { gap, type Metric } from './series.js';
import type { Shared } from './shared.js';
import { type Inks, Spark } from './spark.js';
import { age, NOT_KNOWN, reading, size } from './units.js';

/** One GPU. */
export interface Row {
  values: readonly number[];
  mine: boolean;
  /** What is all of it, where each GPU has its own. */
  total: number | null;
  /** The number of its color. */
  hue: number;
}

/** The values of all GPUs up to `now`. */
export interface Many {
  time: readonly number[];
  /** The index of the first sample to draw. */
  from: number;
  now: number;
  /** Seconds from left to right. */
  window: number;
  /** The value at the top. */
  top: number;
  rows: readonly Row[];
  /** Where the pointer is, as a share of the width. */
  hover: number | null;
}

type Pen = CanvasRenderingContext2D;

/** The colors of gpumagic/display/svg.py: a GPU has its own wherever it is a line. */
export const HUES = [
  '#2f80ed',
  '#55a144',
  '#ba2997',
  '#8f5c2f',
  '#c07e9d',
  '#127a6b',
  '#685f99',
  '#a876f2',
];

/** The color of each GPU by CUDA's number of it; where it has none, or another has it, a free one. */
export function hues(numbers: readonly (number | null)[]): number[] {
  const taken = new Set<number>();
  const take = (hue: number): number => {
    let free = hue % HUES.length;
    while (taken.has(free) && taken.size < HUES.length) free = (free + 1) % HUES.length;
    taken.add(free);
    return free;
  };
  const own = numbers.map((number, n) =>
    number !== null && numbers.indexOf(number) === n ? take(number) : null,
  );
  return own.map((hue) => hue ?? take(0));
}

/** A line for each GPU. */
export function lines(pen: Pen, many: Many, width: number, height: number, inks: Inks): void {
  const { time, from, now, window, top, rows } = many;
  const floor = height - 1.5;
  const x = (n: number): number => width - ((now - (time[n] as number)) * width) / window;
  const y = (value: number): number => floor - Math.min(value / top, 1) * (floor - 2);
  pen.strokeStyle = inks.rule;
  pen.lineWidth = 1;
  pen.setLineDash([2, 3]);
  for (const share of [0, 0.5, 1]) {
    pen.beginPath();
    pen.moveTo(0, y(top * share));
    pen.lineTo(width, y(top * share));
    pen.stroke();
  }
  pen.setLineDash([]);
  for (const { values, mine, hue } of rows) {
    pen.strokeStyle = HUES[hue] as string;
    pen.lineWidth = mine ? 2.25 : 1.25;
    pen.beginPath();
    let drawing = false;
    for (let n = Math.max(from - 1, 0); n < time.length; n++) {
      const value = values[n] as number;
      if (Number.isNaN(value)) drawing = false;
      else if (drawing && !gap(time, n)) pen.lineTo(x(n), y(value));
      else {
        pen.moveTo(x(n), y(value));
        pen.lineTo(x(n) + 0.5, y(value));
        drawing = true;
      }
    }
    pen.stroke();
  }
  cursor(pen, many, width, height, inks);
}

/** A row for each GPU, the fuller its color the more; what is not known is empty. */
export function heat(pen: Pen, many: Many, width: number, height: number, inks: Inks): void {
  const { time, from, now, window, top, rows } = many;
  const tall = height / rows.length;
  // On whole pixels: neighbors neither overlap nor leave a seam.
  const x = (at: number): number => Math.round(width - ((now - at) * width) / window);
  rows.forEach(({ values, mine, total }, row) => {
    pen.fillStyle = mine ? inks.mine : inks.busy;
    for (let n = Math.max(from, 1); n < time.length; n++) {
      const value = values[n] as number;
      if (Number.isNaN(value)) continue;
      const end = time[n] as number;
      const begin = gap(time, n) ? end - 1 : (time[n - 1] as number);
      // What is known to be nothing differs from what is not known.
      pen.globalAlpha = 0.06 + 0.94 * Math.min(value / (total ?? top), 1);
      pen.fillRect(x(begin), row * tall, Math.max(x(end) - x(begin), 1), Math.max(tall - 1, 1));
    }
  });
  pen.globalAlpha = 1;
  cursor(pen, many, width, height, inks);
}

function cursor(pen: Pen, { hover }: Many, width: number, height: number, inks: Inks): void {
  if (hover === null) return;
  pen.fillStyle = inks.driver;
  pen.fillRect(hover * width - 0.5, 0, 1, height);
}

/** More lines than this are told apart by nobody. */
const LINES = 8;
/** How far an arrow key goes, as a share of the width. */
const STEP = 0.02;
const percent = (value: number): string => reading(value, '%');
const rate = (value: number): string => `${size(value)}/s`;

/** One GPU in the charts. */
interface Line {
  uuid: string;
  name: string;
  total: number | null;
  mine: boolean;
  hue: number;
}

/** One chart of all GPUs. */
class Overlay {
  readonly node: HTMLElement;
  readonly spark = new Spark();
  #shared: Shared;
  #metric: Metric;
  #say: (value: number) => string;
  #top: (lines: readonly Line[], most: number) => number;
  #most = new Field('span', 'dim');
  #span = new Field();
  #lines: readonly Line[] = [];
  /** Where the pointer or the keyboard is, as a share of the width and the height. */
  #at: [number, number] | null = null;

  constructor(
    metric: Metric,
    title: string,
    say: (value: number) => string,
    top: (lines: readonly Line[], most: number) => number,
    shared: Shared,
  ) {
    [this.#metric, this.#say, this.#top, this.#shared] = [metric, say, top, shared];
    const canvas = this.spark.node;
    canvas.tabIndex = 0;
    canvas.setAttribute('aria-label', shared.t('%1 of all GPUs over time', title));
    canvas.addEventListener('pointermove', ({ offsetX, offsetY }) => {
      this.#at = [offsetX / this.spark.width, offsetY / this.spark.height];
      this.draw();
    });
    for (const away of ['pointerleave', 'blur'])
      canvas.addEventListener(away, () => this.#point(null));
    canvas.addEventListener('keydown', (event) => this.#key(event));
    const axis = h('div', 'span dim', this.#span.node, h('span', '', shared.t('now')));
    const head = h('div', 'over-head', h('h2', '', title), this.#most.node);
    this.node = h('section', 'over', head, canvas, axis);
    shared.watch(this.spark);
  }

  /** Whether there is anything to show. */
  update(lines: readonly Line[]): void {
    const { series, window, t } = this.#shared;
    this.#lines = lines;
    show(
      this.node,
      lines.some(({ uuid }) => series.has(uuid, this.#metric)),
    );
    this.#span.say(`−${age(window)}`);
    const rows = lines.length > LINES;
    this.spark.node.style.height = rows ? `${Math.max(lines.length * 5, 60) + 4}px` : '';
    const top = this.#top(lines, this.#peak());
    this.#most.say(t('up to %1', this.#say(top)));
  }

  draw(): void {
    if (this.node.hidden) return;
    const { series, now, window, inks } = this.#shared;
    const pen = this.spark.begin();
    const many: Many = {
      time: series.time,
      from: series.from(now - window),
      now,
      window,
      top: this.#top(this.#lines, this.#peak()),
      rows: this.#lines.map(({ uuid, mine, hue, total }) => ({
        values: series.values(uuid, this.#metric),
        mine,
        hue,
        total: this.#metric === 'memory' ? total : null,
      })),
      hover: this.#at?.[0] ?? null,
    };
    if (pen)
      (this.#lines.length > LINES ? heat : lines)(
        pen,
        many,
        this.spark.width,
        this.spark.height,
        inks,
      );
    if (this.#at) this.#tell(false);
  }

  dispose(): void {
    this.#shared.unwatch(this.spark);
  }

  #peak(): number {
    const { series, now, window } = this.#shared;
    const from = series.from(now - window);
    let most = 0;
    for (const { uuid } of this.#lines)
      for (const value of series.values(uuid, this.#metric).slice(from))
        if (value > most) most = value;
    return most;
  }

  #key(event: KeyboardEvent): void {
    const way = {
      ArrowLeft: [-STEP, 0],
      ArrowRight: [STEP, 0],
      ArrowUp: [0, -1],
      ArrowDown: [0, 1],
    }[event.key];
    if (!way) {
      if (event.key === 'Escape') this.#point(null);
      return;
    }
    event.preventDefault();
    const [x, y] = this.#at ?? [1, 0];
    const [right, down] = way as [number, number];
    const inside = (value: number): number => Math.min(Math.max(value, 0), 0.999);
    this.#point([inside(x + right), inside(y + down / Math.max(this.#lines.length, 1))]);
    this.#tell(true);
  }

  #point(at: [number, number] | null): void {
    this.#at = at;
    if (!at) {
      this.spark.hover = null;
      this.#shared.tip(this.spark, [], false);
    }
    this.draw();
  }

  /** Each GPU at the time under the pointer; of many the one under it. */
  #tell(spoken: boolean): void {
    if (!this.#at) return;
    const { series, now, window, t } = this.#shared;
    const [x, y] = this.#at;
    const when = now - window * (1 - x);
    const n = Math.min(series.from(when), series.time.length - 1);
    const rows = this.#lines.length > LINES;
    const told = rows ? [this.#lines[Math.floor(y * this.#lines.length)]] : this.#lines;
    const lines = told.flatMap((line) => {
      if (!line) return [];
      const value = series.values(line.uuid, this.#metric)[n] ?? Number.NaN;
      return [`${line.name} ${Number.isNaN(value) ? NOT_KNOWN : this.#say(value)}`];
    });
    this.spark.hover = x * this.spark.width;
    this.#shared.tip(this.spark, [t('%1 ago', age(now - when)), ...lines], spoken);
  }
}

/** A GPU's color. */
class Key {
  #dot = new Field('i', 'dot');
  #name = new Field('span', 'dim');
  readonly node = h('li', '', this.#dot.node, this.#name.node);

  update({ name, mine, hue }: Line): void {
    this.#name.say(name).look(mine ? 'own' : 'dim');
    this.#dot.look(`dot line-${hue}`);
  }
}

export class Overview {
  readonly node: HTMLElement;
  #shared: Shared;
  #charts: Overlay[];
  #keys = new Rows<Line, Key>(h('ul', 'keys'), () => new Key());
  #scale: HTMLElement;
  #rows = new Field();

  constructor(shared: Shared) {
    const { t } = shared;
    this.#shared = shared;
    const all = (): number => 100;
    const most = (_: readonly Line[], most: number): number => most || 1;
    const totals = (lines: readonly Line[], most: number): number =>
      lines.reduce((sum, { total }) => Math.max(sum, total ?? 0), 0) || most || 1;
    this.#charts = [
      new Overlay('utilization', t('Utilization'), percent, all, shared),
      new Overlay('memory', t('Memory'), size, totals, shared),
      new Overlay('power', t('Power'), (value) => reading(value, 'W'), most, shared),
      new Overlay('pcie', 'PCIe', rate, most, shared),
      new Overlay('nvlink', 'NVLink', rate, most, shared),
    ];
    this.#scale = h('p', 'dim scale', this.#rows.node, h('i'), t('the most'));
    const charts = h('div', 'overs', ...this.#charts.map(({ node }) => node));
    this.node = h('div', 'overview', this.#keys.node, this.#scale, charts);
  }

  update(views: readonly View[]): void {
    const { here } = this.#shared;
    const colors = hues(views.map((view) => ordinalOf(view, here)));
    const lines = views.map((view, n) => ({
      uuid: view.gpu.uuid,
      name: called(view, here),
      total: view.gpu.memory_total,
      mine: view.parts.mine > 0,
      hue: colors[n] as number,
    }));
    const few = lines.length <= LINES;
    show(this.node, lines.length > 0);
    show(this.#keys.node, few && lines.length > 1);
    show(this.#scale, !few);
    const { t } = this.#shared;
    this.#rows.say(
      few
        ? ''
        : t('A row for each, %1 to %2: none', lines[0]?.name ?? '', lines.at(-1)?.name ?? ''),
    );
    this.#keys.update(few ? lines.map((line) => [line.uuid, line] as const) : []);
    for (const chart of this.#charts) chart.update(lines);
  }

  draw(): void {
    for (const chart of this.#charts) chart.draw();
  }

  dispose(): void {
    for (const chart of this.#charts) chart.dispose();
  }
}

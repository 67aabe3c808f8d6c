/** Draw a small chart over time on a canvas. */

import type { CellRun } from '../snapshot.js';
import type { Owner } from './owners.js';
import { gap } from './past.js';

/** Colors of the current theme. */
export type Inks = Record<Owner | 'busy' | 'mark' | 'rule', string>;

/** One layer of a stacked chart, from the bottom up. */
export interface Band {
  values: readonly number[];
  ink: string;
  striped: boolean;
}

/** A time axis that ends now. */
export interface Axis {
  time: readonly number[];
  /** The index of the first sample to draw. */
  from: number;
  now: number;
  /** Seconds from left to right. */
  window: number;
  /** The value at the top. */
  top: number;
}

/** The chart of one GPU. */
export interface Drawn extends Axis {
  /** The whole; NaN is "unknown". */
  values: readonly number[];
  /** The layers; if empty, the chart is a line. */
  bands: readonly Band[];
  /** The color of the line. */
  ink: string;
  runs: readonly CellRun[];
}

/** Height of the marks of cells, in pixels. */
const LANE = 3;
export type Pen = CanvasRenderingContext2D;
/** Convert times and values to pixels. */
interface Scale {
  x(at: number): number;
  y(value: number): number;
  floor: number;
}

/** A canvas that follows the size of its box. */
export class Spark {
  readonly node = document.createElement('canvas');
  /** The pointer's position in pixels from the left. */
  hover: number | null = null;
  width = 200;
  height = 28;
  #pen: Pen | null = null;

  constructor(label: string) {
    this.node.setAttribute('role', 'img');
    this.node.ariaLabel = label;
  }

  /** Return a cleared canvas of its box's size; null if drawing is impossible. */
  begin(): Pen | null {
    const ratio = globalThis.devicePixelRatio || 1;
    const { node } = this;
    const { clientWidth: width, clientHeight: height } = node;
    if (width && height) [this.width, this.height] = [width, height];
    this.#pen ??= node.getContext('2d');
    const pen = this.#pen;
    if (!pen) return null;
    const [w, h] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (node.width !== w || node.height !== h) [node.width, node.height] = [w, h];
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    pen.lineJoin = 'round';
    return pen;
  }

  /** Return the scale above a margin at the bottom. */
  scale({ now, window, top }: Axis, margin: number): Scale {
    const floor = this.height - margin;
    return {
      floor,
      x: (at) => this.width - ((now - at) * this.width) / window,
      y: (value) => floor - Math.min(value / top, 1) * (floor - 1),
    };
  }

  /** Draw dotted lines at these heights. */
  guides(pen: Pen, ink: string, ...heights: number[]): void {
    pen.strokeStyle = ink;
    pen.lineWidth = 1;
    pen.setLineDash([2, 3]);
    for (const y of heights) {
      pen.beginPath();
      pen.moveTo(0, y);
      pen.lineTo(this.width, y);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  /** Draw where the pointer is. */
  cursor(pen: Pen, ink: string, height: number): void {
    if (this.hover === null) return;
    pen.fillStyle = ink;
    pen.fillRect(this.hover - 0.5, 0, 1, height);
  }

  draw(drawn: Drawn, inks: Inks): void {
    const pen = this.begin();
    if (!pen) return;
    const scale = this.scale(drawn, LANE + 1.5);
    this.#marks(pen, drawn, scale, inks.mark);
    this.guides(pen, inks.rule, 1, scale.floor);
    for (const piece of pieces(drawn, drawn.values)) {
      if (drawn.bands.length) stack(pen, drawn, piece, scale);
      else line(pen, drawn, piece, scale);
      // A line on the floor means that values are known, even if they are 0.
      const from = scale.x(drawn.time[piece[0]] as number);
      const to = scale.x(drawn.time[piece[1]] as number);
      pen.fillStyle = drawn.ink;
      pen.fillRect(from, scale.floor - 0.25, Math.max(to - from, 1), 1);
    }
    this.cursor(pen, inks.mark, this.height - LANE);
  }

  #marks(pen: Pen, { runs, now }: Drawn, { x }: Scale, ink: string): void {
    pen.fillStyle = ink;
    pen.font = '9px sans-serif';
    for (const run of runs) {
      const end = x(run.end ?? now);
      if (end < 0) continue;
      const start = Math.max(x(run.start), 0);
      const wide = Math.max(end - start, 2);
      pen.globalAlpha = 0.09;
      pen.fillRect(start, 0, wide, this.height - LANE);
      pen.globalAlpha = 0.85;
      // A thin gap separates two cells.
      pen.fillRect(start, this.height - 2, Math.max(wide - 1, 1.5), 2);
      const name = `[${run.count ?? ' '}]`;
      if (wide > 7 * name.length) pen.fillText(name, start + 2, 8);
    }
    pen.globalAlpha = 1;
  }
}

/** Trace a line through the samples of a piece. */
export function trace(
  pen: Pen,
  { time }: Axis,
  values: readonly number[],
  [first, last]: Piece,
  { x, y }: Scale,
): void {
  pen.beginPath();
  for (let n = first; n <= last; n++) pen.lineTo(x(time[n] as number), y(values[n] as number));
  // A single sample is a dot.
  pen.lineTo(x(time[last] as number) + 0.5, y(values[last] as number));
  pen.stroke();
}

function line(pen: Pen, drawn: Drawn, piece: Piece, scale: Scale): void {
  const { x, floor } = scale;
  const { time, values, ink } = drawn;
  pen.strokeStyle = pen.fillStyle = ink;
  pen.lineWidth = 1.25;
  trace(pen, drawn, values, piece, scale);
  pen.lineTo(x(time[piece[1]] as number) + 0.5, floor);
  pen.lineTo(x(time[piece[0]] as number), floor);
  pen.globalAlpha = 0.18;
  pen.fill();
  pen.globalAlpha = 1;
}

/** Return a fill of diagonal stripes. */
function stripes(pen: Pen, ink: string): CanvasPattern | string {
  const tile = document.createElement('canvas');
  tile.width = tile.height = 4;
  const brush = tile.getContext('2d');
  if (!brush) return ink;
  brush.fillStyle = ink;
  for (let n = 0; n < 4; n++) brush.fillRect(n, 3 - n, 2, 1);
  brush.fillRect(0, 0, 1, 1);
  return pen.createPattern(tile, 'repeat') ?? ink;
}

function stack(pen: Pen, { time, bands }: Drawn, [first, last]: Piece, { x, y }: Scale): void {
  const end = x(time[last] as number) + 0.75;
  let under = new Array<number>(last - first + 1).fill(0);
  for (const { values, ink, striped } of bands) {
    const over = under.map((below, n) => below + (values[first + n] || 0));
    if (over.some((above, n) => above > (under[n] as number))) {
      const at = (n: number): number => x(time[first + n] as number);
      pen.fillStyle = striped ? stripes(pen, ink) : ink;
      pen.beginPath();
      for (const [n, above] of over.entries()) pen.lineTo(at(n), y(above));
      pen.lineTo(end, y(over.at(-1) as number));
      pen.lineTo(end, y(under.at(-1) as number));
      for (let n = under.length - 1; n >= 0; n--) pen.lineTo(at(n), y(under[n] as number));
      pen.fill();
    }
    under = over;
  }
}

type Piece = readonly [first: number, last: number];

/** Return the pieces without gaps, from the sample before the first one to draw. */
export function pieces({ time, from }: Axis, values: readonly number[]): Piece[] {
  const found: [number, number][] = [];
  let drawing = false;
  for (let n = Math.max(from - 1, 0); n < time.length; n++) {
    const isKnown = !Number.isNaN(values[n] ?? Number.NaN);
    const piece = found.at(-1);
    if (isKnown && drawing && piece && !gap(time, n)) piece[1] = n;
    else if (isKnown) found.push([n, n]);
    drawing = isKnown;
  }
  return found;
}

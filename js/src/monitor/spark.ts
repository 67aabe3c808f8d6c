/** A small chart over time, drawn on a canvas that follows its box and its theme. */

import type { CellRun } from '../snapshot.js';
import type { Owner } from './owners.js';
import { gap } from './series.js';

/** Colors as the page has them now. */
export type Inks = Record<Owner | 'busy' | 'mark' | 'rule', string>;

/** A part of a whole, from the bottom up. */
export interface Band {
  values: readonly number[];
  ink: string;
}

/** What a chart shows of one GPU up to `now`. */
export interface Drawn {
  time: readonly number[];
  /** The whole; NaN is "not known". */
  values: readonly number[];
  /** Its parts, which fill it; none: it is a line with a light filling. */
  bands: readonly Band[];
  /** The color of the line. */
  ink: string;
  /** The index of the first sample to draw. */
  from: number;
  /** The value at the top. */
  top: number;
  now: number;
  /** Seconds from left to right. */
  window: number;
  runs: readonly CellRun[];
}

/** Pixels at the bottom that belong to the marks of cells. */
const LANE = 3;
type Pen = CanvasRenderingContext2D;
/** From a sample's time and value to pixels. */
interface Scale {
  x(at: number): number;
  y(value: number): number;
  floor: number;
}

export class Spark {
  readonly node = document.createElement('canvas');
  /** Where the pointer is, in pixels from the left. */
  hover: number | null = null;
  width = 200;
  height = 28;
  #pen: Pen | null = null;

  constructor() {
    this.node.setAttribute('role', 'img');
  }

  /** Takes the size of its box; the next `draw` follows it. */
  resize(width: number, height: number): void {
    if (width > 0 && height > 0) [this.width, this.height] = [width, height];
  }

  draw(drawn: Drawn, inks: Inks): void {
    const pen = this.begin();
    if (!pen) return;
    const { now, window, top } = drawn;
    const floor = this.height - LANE - 1.5;
    const perSecond = this.width / window;
    const scale: Scale = {
      floor,
      x: (at) => this.width - (now - at) * perSecond,
      y: (value) => floor - Math.min(value / top, 1) * (floor - 1),
    };
    this.#marks(pen, drawn, scale, inks.mark);
    this.#guide(pen, 1, inks.rule);
    this.#guide(pen, floor, inks.rule);
    const pieces = known(drawn);
    if (drawn.bands.length) this.#stack(pen, drawn, pieces, scale);
    else this.#line(pen, drawn, pieces, scale);
    this.#base(pen, drawn, pieces, scale);
    if (this.hover === null) return;
    pen.fillStyle = inks.mark;
    pen.fillRect(this.hover - 0.5, 0, 1, this.height - LANE);
  }

  /** A clean canvas of the right size; null where nothing can be drawn. */
  begin(): Pen | null {
    const ratio = globalThis.devicePixelRatio || 1;
    const { node, width, height } = this;
    if (!this.#pen) this.#pen = node.getContext('2d');
    const pen = this.#pen;
    if (!pen) return null;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (node.width !== w || node.height !== h) {
      node.width = w;
      node.height = h;
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.lineJoin = 'round';
    return pen;
  }

  /** Where 100 % is, and where nothing is known: dots. */
  #guide(pen: Pen, y: number, ink: string): void {
    pen.strokeStyle = ink;
    pen.lineWidth = 1;
    pen.setLineDash([2, 3]);
    pen.beginPath();
    pen.moveTo(0, y);
    pen.lineTo(this.width, y);
    pen.stroke();
    pen.setLineDash([]);
  }

  /** Where something is known, be it 0: a line. */
  #base(pen: Pen, { time, ink }: Drawn, pieces: readonly Piece[], { x, floor }: Scale): void {
    pen.fillStyle = ink;
    for (const [first, last] of pieces) {
      const from = x(time[first] as number);
      pen.fillRect(from, floor - 0.25, Math.max(x(time[last] as number) - from, 1), 1);
    }
  }

  #line(pen: Pen, { time, values, ink }: Drawn, pieces: readonly Piece[], scale: Scale): void {
    const { x, y, floor } = scale;
    pen.strokeStyle = pen.fillStyle = ink;
    pen.lineWidth = 1.25;
    for (const [first, last] of pieces) {
      pen.beginPath();
      for (let n = first; n <= last; n++) pen.lineTo(x(time[n] as number), y(values[n] as number));
      // A sample alone is a dot.
      pen.lineTo(x(time[last] as number) + 0.5, y(values[last] as number));
      pen.stroke();
      pen.lineTo(x(time[last] as number) + 0.5, floor);
      pen.lineTo(x(time[first] as number), floor);
      pen.globalAlpha = 0.18;
      pen.fill();
      pen.globalAlpha = 1;
    }
  }

  #stack(pen: Pen, { time, bands }: Drawn, pieces: readonly Piece[], { x, y }: Scale): void {
    for (const [first, last] of pieces) {
      let under = new Array<number>(last - first + 1).fill(0);
      for (const { values, ink } of bands) {
        const over = under.map((below, n) => below + (values[first + n] || 0));
        if (over.some((above, n) => above > (under[n] as number))) {
          pen.fillStyle = ink;
          pen.beginPath();
          for (const [n, above] of over.entries())
            pen.lineTo(x(time[first + n] as number), y(above));
          pen.lineTo(x(time[last] as number) + 0.75, y(over.at(-1) as number));
          pen.lineTo(x(time[last] as number) + 0.75, y(under.at(-1) as number));
          for (let n = under.length - 1; n >= 0; n--)
            pen.lineTo(x(time[first + n] as number), y(under[n] as number));
          pen.fill();
        }
        under = over;
      }
    }
  }

  #marks(pen: Pen, { runs, now }: Drawn, { x }: Scale, ink: string): void {
    pen.fillStyle = ink;
    for (const run of runs) {
      const end = x(run.end ?? now);
      if (end < 0) continue;
      const start = Math.max(x(run.start), 0);
      const wide = Math.max(end - start, 2);
      pen.globalAlpha = 0.09;
      pen.fillRect(start, 0, wide, this.height - LANE);
      pen.globalAlpha = 0.85;
      // A hair of space keeps two cells apart.
      pen.fillRect(start, this.height - 2, Math.max(wide - 1, 1.5), 2);
    }
    pen.globalAlpha = 1;
  }
}

type Piece = readonly [first: number, last: number];

/** What is known, between gaps. */
function known({ time, values, from }: Drawn): Piece[] {
  const pieces: [number, number][] = [];
  let drawing = false;
  for (let n = Math.max(from - 1, 0); n < time.length; n++) {
    const value = values[n];
    if (value === undefined || Number.isNaN(value)) {
      drawing = false;
      continue;
    }
    const piece = pieces.at(-1);
    if (drawing && piece && !gap(time, n)) piece[1] = n;
    else pieces.push([n, n]);
    drawing = true;
  }
  return pieces;
}

/** Pictures of one thing over time for many GPUs, drawn on a canvas. */

import { gap } from './series.js';
import type { Inks } from './spark.js';

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

/** The colors of gpumagic/display/plot.py: a GPU has its own wherever it is a line. */
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

/** Pictures of one thing over time for many GPUs, drawn on a canvas. */

import { gap } from './series.js';
import type { Inks } from './spark.js';

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
  /** `total`: what is all of it, where each GPU has its own. */
  rows: readonly { values: readonly number[]; mine: boolean; total: number | null }[];
  /** Where the pointer is, as a share of the width. */
  hover: number | null;
}

type Pen = CanvasRenderingContext2D;

/** Colors of lines: none is that of trouble. */
export const HUES = [
  '#1e88e5',
  '#00897b',
  '#8e24aa',
  '#7cb342',
  '#5c6bc0',
  '#00acc1',
  '#8d6e63',
  '#78909c',
];

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
  rows.forEach(({ values, mine }, row) => {
    pen.strokeStyle = HUES[row % HUES.length] as string;
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
  });
  cursor(pen, many, width, height, inks);
}

/** A row for each GPU, the darker the more; what is not known is empty. */
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

/** A small chart of one column over time, drawn on a canvas that follows its box and its theme. */

import type { CellRun } from '../snapshot.js';
import { gap } from './series.js';

/** Colours as the page has them now. */
export interface Inks {
  utilization: string;
  memory: string;
  mark: string;
  line: string;
}

/** What a chart shows: one column of one GPU up to `now`. */
export interface Drawn {
  time: readonly number[];
  values: readonly number[];
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

export class Spark {
  readonly node = document.createElement('canvas');
  /** Where the pointer is, in pixels from the left. */
  hover: number | null = null;
  width = 200;
  height = 34;
  #kind: 'utilization' | 'memory';
  #pen: CanvasRenderingContext2D | null = null;

  constructor(kind: 'utilization' | 'memory') {
    this.#kind = kind;
    this.node.setAttribute('role', 'img');
  }

  /** Takes the size of its box; the next `draw` follows it. */
  resize(width: number, height: number): void {
    if (width > 0 && height > 0) [this.width, this.height] = [width, height];
  }

  draw({ time, values, from, top, now, window, runs }: Drawn, inks: Inks): void {
    const ratio = globalThis.devicePixelRatio || 1;
    const { node, width, height } = this;
    if (!this.#pen) this.#pen = node.getContext('2d');
    const pen = this.#pen;
    if (!pen) return;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (node.width !== w || node.height !== h) {
      node.width = w;
      node.height = h;
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const floor = height - LANE - 1.5;
    const scale = width / window;
    const x = (at: number): number => width - (now - at) * scale;
    const y = (value: number): number => floor - Math.min(value / top, 1) * (floor - 1);
    if (runs.length) this.#marks(pen, runs, x, now, inks.mark);
    pen.fillStyle = inks.line;
    pen.fillRect(0, floor + 0.5, width, 1);

    pen.strokeStyle = pen.fillStyle = inks[this.#kind];
    pen.lineWidth = 1.25;
    pen.lineJoin = 'round';
    pen.beginPath();
    // Pieces between gaps, each as the indices of its first and its last sample.
    const pieces: number[] = [];
    let drawing = false;
    for (let n = Math.max(from - 1, 0); n < time.length; n++) {
      const value = values[n];
      if (value === undefined || Number.isNaN(value)) {
        drawing = false;
        continue;
      }
      const [across, up] = [x(time[n] as number), y(value)];
      if (drawing && !gap(time, n)) {
        pen.lineTo(across, up);
        pieces[pieces.length - 1] = n;
      } else {
        pen.moveTo(across, up);
        // A sample alone is a dot.
        pen.lineTo(across + 0.5, up);
        pieces.push(n, n);
      }
      drawing = true;
    }
    pen.stroke();
    pen.globalAlpha = 0.16;
    pen.beginPath();
    for (let piece = 0; piece < pieces.length; piece += 2) {
      const [first, last] = [pieces[piece] as number, pieces[piece + 1] as number];
      pen.moveTo(x(time[first] as number), floor + 0.5);
      for (let n = first; n <= last; n++) pen.lineTo(x(time[n] as number), y(values[n] as number));
      pen.lineTo(x(time[last] as number), floor + 0.5);
    }
    pen.fill();
    pen.globalAlpha = 1;
    if (this.hover !== null) {
      pen.fillStyle = inks.mark;
      pen.fillRect(this.hover - 0.5, 0, 1, height - LANE);
    }
  }

  #marks(
    pen: CanvasRenderingContext2D,
    runs: readonly CellRun[],
    x: (at: number) => number,
    now: number,
    ink: string,
  ): void {
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

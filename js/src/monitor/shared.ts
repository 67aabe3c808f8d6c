/** What the parts of one monitor have in common, and what a host gives it. */

import type { Holdings, ProcessSample, Timing } from '../snapshot.js';
import type { Runs, Series } from './series.js';
import type { Inks, Spark } from './spark.js';

/** What a host can do for the reader; an action that is absent has no button. */
export interface Actions {
  /** Opens the notebook. */
  goTo?(process: ProcessSample): void;
  interrupt?(process: ProcessSample): void;
  /** The host asks before it does. */
  shutDown?(process: ProcessSample): void;
  /** Of an orphan; the host asks before it does. */
  terminate?(process: ProcessSample): void;
  /** Looks again what the doctor finds. */
  look?(): void;
  /** Keeps what the reader chose. */
  density?(density: Density): void;
  /** Opens the GPUs as a page of their own. */
  page?(): void;
  /** Some table of what this notebook holds was opened, or all were closed. */
  holdings?(wanted: boolean): void;
  /** How many pixels in height are seen without scrolling. */
  room?(): number;
}

/** A card or a line for each GPU; "auto": lines where there are many, or cards have no room. */
export type Density = 'auto' | 'cards' | 'lines';

/** Text in the reader's language; %1, %2 stand for the values. */
export type Translate = (text: string, ...values: (string | number)[]) => string;

export const english: Translate = (text, ...values) =>
  values.length ? text.replace(/%(\d)/g, (mark, n) => String(values[n - 1] ?? mark)) : text;

export interface Shared {
  readonly t: Translate;
  readonly actions: Actions;
  readonly series: Series;
  readonly runs: Runs;
  inks: Inks;
  /** The kernel that "this notebook" is. */
  here: string | null;
  now: number;
  /** What this kernel measures. */
  timing: Timing;
  /** What this notebook holds, or why it is not known; null where nobody has asked. */
  holdings: Holdings | string | null;
  /** Of a GPU, the table of what this notebook holds is open, or no longer. */
  wants(uuid: string, open: boolean): void;
  /** Seconds that a chart shows. */
  window: number;
  /** What the reader opened (true) or closed: GPUs by UUID, and others' notebooks. */
  readonly open: Map<string, boolean>;
  /** The notebooks that were last seen on a GPU, by its UUID. */
  readonly were: Map<string, string[]>;
  /** Tells a chart its size, until `unwatch`. */
  watch(spark: Spark): void;
  unwatch(spark: Spark): void;
  /** Shows lines of text at a chart, `spoken` also read aloud; none hides them. */
  tip(at: Spark, lines: string[], spoken: boolean): void;
  /** Open or closed by the reader. */
  toggled(): void;
}

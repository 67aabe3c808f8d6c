/** Declare what a host gives to a monitor, and what the parts of one monitor share. */

import type {
  Check,
  KernelSample,
  OtherHost,
  Place,
  ProcessSample,
  Result,
  Snapshot,
  Timing,
  Variables,
} from '../snapshot.js';
import type { Visibility } from './browser.js';
import type { ProcessButtons } from './buttons.js';
import type { Deaths } from './deaths.js';
import type { Doctor } from './doctor.js';
import type { OtherHosts } from './hosts.js';
import type { Overview } from './overview.js';
import type { Runs, Series } from './series.js';
import type { Inks, Spark } from './spark.js';

/** Actions of a host; an absent one has no button. */
export interface Actions {
  goTo?(process: ProcessSample): void;
  goToCell?(place: Place): void;
  interrupt?(process: ProcessSample): void;
  /** Asks for confirmation. */
  shutDown?(process: ProcessSample): void;
  /** Ends an orphaned process; asks for confirmation. */
  terminate?(process: ProcessSample): void;
  /** Runs the doctor again. */
  doctor?(): void;
  /** Opens the GPUs as a page. */
  page?(): void;
  /** Requests the notebook's variables; false when they are no longer visible on any GPU. */
  variables?(wanted: boolean): void;
}

/** Text in the user's language; %1 and %2 are the values. JupyterLab finds it by these names. */
export interface Translate {
  __(text: string, ...values: (string | number)[]): string;
  /** Return the text for a number, which is %1. */
  _n(one: string, many: string, count: number): string;
}

export const english: Translate = {
  __: (text, ...values) =>
    values.length ? text.replace(/%(\d)/g, (mark, n) => String(values[n - 1] ?? mark)) : text,
  _n: (one, many, count) => english.__(count === 1 ? one : many, count),
};

export interface Connection {
  kind: 'live' | 'connecting' | 'standby' | 'lost';
  text?: string;
}

/** A button that a host offers if there is no GPU. */
export interface OfferButton {
  label: string;
  title: string;
  press(): void;
}

export interface Offer {
  /** The most useful first. */
  buttons: OfferButton[];
  /** Progress, result, or the reason why it is impossible. */
  text: string;
  busy: boolean;
}

/** What a monitor shows in addition to snapshots; a new value replaces the old one. */
export interface State {
  /** The id of this notebook's kernel. */
  here: string | null;
  /** Seconds that a chart shows. */
  window: number;
  connection: Connection;
  /** Other hosts, reported by kernels. */
  hosts: OtherHost[];
  /** The doctor's checks; null hides them. */
  checks: Check[] | null;
  offer: Offer | null;
  /** The progress of a running measurement. */
  timing: Timing;
  timings: Result[];
  results: Result[];
  /** The notebook's variables, or why they are unknown; null if not requested yet. */
  variables: Variables | string | null;
}

/** Parts that JupyterLab's panel has, and the widget in a notebook has not. */
export interface Extras {
  css: string;
  /** Create the charts of all GPUs; only a page has them. */
  overview?(shared: Shared): Overview;
  doctor(shared: Shared): Doctor;
  /** Create the cards of dead kernels. */
  deaths(shared: Shared): Deaths;
  /** Return which kernel fills the RAM, and how fast. */
  filling(snapshot: Snapshot, shared: Shared): Map<KernelSample, string>;
  /** Create the buttons of the toolbar. */
  tools(shared: Shared): HTMLElement[];
  /** Create the buttons of a process. */
  buttons(shared: Shared): ProcessButtons;
  hosts(shared: Shared, visibility: Visibility): OtherHosts;
}

export interface Options {
  actions?: Actions;
  translate?: Translate;
  /** The name of the whole for screen readers. */
  label?: string;
  extras?: Extras;
}

export interface Shared extends State {
  readonly trans: Translate;
  readonly actions: Actions;
  readonly extras: Extras | null;
  readonly series: Series;
  readonly runs: Runs;
  inks: Inks;
  /** The time of the latest snapshot. */
  now: number;
  /** What the user opened (true) or closed, by key. */
  readonly open: Map<string, boolean>;
  /** The GPUs whose variables are visible, by UUID. */
  readonly opened: Set<string>;
  /** Keeps a chart's size up to date, until `unwatch`. */
  watch(spark: Spark): void;
  unwatch(spark: Spark): void;
  /** Shows lines of text at a chart, and reads them to a screen reader if `spoken`. */
  tip(at: Spark, lines: string[], spoken: boolean): void;
  /** Remembers what is open. */
  toggled(): void;
  /** Draws with the next frame. */
  redraw(): void;
}

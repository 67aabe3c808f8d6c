/** Declare what a host gives to a monitor, and what the parts of one monitor share. */

import type {
  Check,
  OtherHost,
  Place,
  ProcessSample,
  Result,
  Snapshot,
  Timing,
  Variables,
} from '../snapshot.js';
import type { Opened } from './browser.js';
import type { ProcessButtons } from './buttons.js';
import type { View } from './owners.js';
import type { Past } from './past.js';
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
  /** Requests the notebook's variables if they changed, or if `pressed`; called when drawn. */
  variables?(pressed: boolean): void;
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

/** A part of JupyterLab's panel, about the server's host. */
export interface Part {
  readonly node: HTMLElement;
  update(snapshot: Snapshot, views: readonly View[]): void;
  draw?(): void;
}

/** What only JupyterLab's panel has, and not the widget in a notebook. */
export interface Extras {
  css: string;
  parts(shared: Shared): Part[];
  /** Creates the buttons of a process. */
  buttons(shared: Shared): ProcessButtons;
}

export interface Options {
  actions?: Actions;
  translate?: Translate;
  /** The name of the whole for screen readers. */
  label?: string;
  extras?: Extras;
  /** Samples and cells, which the monitors of a page share. */
  past?: Past;
}

export interface Shared extends State {
  readonly trans: Translate;
  readonly actions: Actions;
  readonly extras: Extras | null;
  readonly past: Past;
  readonly opened: Opened;
  inks: Inks;
  /** The time of the latest snapshot. */
  now: number;
  /** Shows lines of text at a chart, and reads them to a screen reader if `spoken`. */
  tip(at: Spark, lines: string[], spoken: boolean): void;
  /** Draws with the next frame. */
  redraw(): void;
}

/** Draw the live monitor: own a node, take snapshots, and draw only what can be seen. */

import type {
  CellRun,
  Check,
  History,
  Holdings,
  OtherHost,
  Result,
  Snapshot,
  Timing,
} from '../snapshot.js';
import { inks, onTheme, probe, remember, remembered, Sight, Sizes } from './browser.js';
import { Tip } from './chart.js';
import { Doctor, OFFER_CSS, type Offer } from './doctor.js';
import { Field, h, icon, show } from './dom.js';
import { details, Machines, machine } from './hosts.js';
import { broken } from './names.js';
import { Results } from './results.js';
import { Runs, Series } from './series.js';
import { type Actions, type Density, english, type Shared, type Translate } from './shared.js';
import type { Inks } from './spark.js';
import { CSS } from './style.js';

const ICONS = {
  cards: 'M2.500 3h11v4h-11zM2.500 9h11v4h-11z',
  lines: 'M2.500 4h11M2.500 8h11M2.500 12h11',
  page: 'M9 3h4v4M13 3l-5 5M7 4h-4v9h9v-4',
};

/** What it has to know of the GPUs. */
type Shown = Pick<Machines, 'count' | 'lines' | 'hosts'>;

export class Toolbar {
  readonly node: HTMLElement;
  readonly state = new Field('span', 'state dim');
  #host = new Field('span', 'host dim');
  #shared: Shared;
  #density: [Density, HTMLButtonElement][];
  #choice: HTMLElement;

  /** `chosen` gets what the reader presses. */
  constructor(shared: Shared, chosen: (density: Density) => void) {
    const { t, actions } = shared;
    this.#shared = shared;
    this.state.node.setAttribute('role', 'status');
    const button = (path: string, title: string, pressed: () => void): HTMLButtonElement => {
      const made = h('button', 'tool', icon(path));
      made.type = 'button';
      made.title = made.ariaLabel = title;
      made.addEventListener('click', pressed);
      return made;
    };
    const cards = button(ICONS.cards, t('A card for each GPU'), () => chosen('cards'));
    const lines = button(ICONS.lines, t('A line for each GPU'), () => chosen('lines'));
    this.#density = [
      ['cards', cards],
      ['lines', lines],
    ];
    this.#choice = h('span', 'tools', cards, lines);
    if (actions.page) {
      const page = button(ICONS.page, t('Open as a page'), () => actions.page?.());
      this.#choice.append(page);
    }
    this.node = h('div', 'top', this.#host.node, this.state.node, this.#choice);
    this.update(null, { count: 0, lines: false, hosts: [] });
  }

  /** Where there are other hosts, each has its name above its GPUs. */
  update(snapshot: Snapshot | null, { count, lines, hosts }: Shown): void {
    show(this.#choice, count > 0);
    for (const [density, button] of this.#density) {
      const pressed = String((density === 'lines') === lines);
      if (button.ariaPressed !== pressed) button.ariaPressed = pressed;
    }
    if (!snapshot) return;
    const { t } = this.#shared;
    const several = hosts.length > 0;
    const said = several
      ? [t('%1 hosts', hosts.length + 1), t('%1 GPUs', count)]
      : [snapshot.host.name ?? '', ...machine(snapshot, t)];
    this.#host.offer(said.filter(Boolean).join(' · ')).hint(several ? '' : details(snapshot, t));
  }
}

export type { Actions, Translate } from './shared.js';

export interface Options {
  actions?: Actions;
  translate?: Translate;
  /** What a screen reader calls the whole. */
  label?: string;
  /** As a page of its own, with all GPUs in one chart. */
  wide?: boolean;
}

export interface Connection {
  kind: 'live' | 'connecting' | 'polling' | 'standby' | 'lost';
  text?: string;
}

/** In a chart; more than it has pixels is no use. */
const POINTS = 800;

export interface ViewOptions {
  /** A card or a line for each GPU. */
  density?: Density;
  /** Seconds that a chart shows. */
  window?: number;
}

export class Monitor {
  readonly node = document.createElement('div');
  #shared: Shared;
  #all = h('div', 'all');
  #toolbar: Toolbar;
  #doctor: Doctor;
  #machines: Machines;
  #timings: Results;
  #results: Results;
  #bones = h('div', 'bones dim');
  #tip = new Tip(this.#all);
  #probe = probe();
  #sizes: Sizes;
  #sight = new Sight();
  #endTheme: () => void;
  #snapshot: Snapshot | null = null;
  #checks: Check[] | null = null;
  #offer: Offer | null = null;
  #visible = true;
  #stale = true;
  #themed = 2;
  #wanted = new Set<string>();
  #frame = 0;
  #disposed = false;

  constructor({ actions = {}, translate: t = english, label, wide = false }: Options = {}) {
    this.#sizes = new Sizes(() => this.#due());
    this.#shared = {
      t,
      actions,
      series: new Series(),
      runs: new Runs(),
      inks: {} as Inks,
      here: null,
      now: 0,
      timing: {},
      holdings: null,
      wants: (uuid, open) => this.#want(uuid, open),
      window: 120,
      open: remembered(),
      were: new Map(),
      watch: (spark) => this.#sizes.watch(spark),
      unwatch: (spark) => this.#sizes.unwatch(spark),
      tip: (at, lines, spoken) => this.#tip.point(at, lines, spoken),
      toggled: () => remember(this.#shared.open),
    };
    this.#doctor = new Doctor(this.#shared);
    this.#toolbar = new Toolbar(this.#shared, (density) => this.#choose(density));
    this.#machines = new Machines(
      this.#shared,
      this.#sight,
      wide,
      () => this.#due(),
      this.#doctor.node,
      this.#bones,
    );
    this.#timings = new Results(t('Timings'));
    this.#results = new Results(t('Results'));
    this.#build(label ?? t('GPU monitor'));
    this.#endTheme = onTheme(() => {
      // A theme's style sheet may arrive after its name.
      this.#themed = 2;
      this.#due();
    });
    this.#sight.watch(this.node, (visible) => {
      this.#visible = visible;
      if (visible) this.#due();
    });
    this.connection({ kind: 'connecting' });
  }

  /** Takes what is new; it is drawn with the next frame, and not at all while it cannot be seen. */
  update(snapshot: Snapshot): void {
    this.#snapshot = snapshot;
    this.#shared.now = snapshot.time;
    this.#shared.series.push(this.#machines.together(snapshot));
    this.#due();
  }

  /** What kernels tell of other hosts. */
  hosts(hosts: OtherHost[]): void {
    this.#machines.hosts = hosts;
    this.#due();
  }

  /** Puts a history in the place of what is known of the same time. */
  seed(history: History): void {
    this.#shared.series.seed(history);
    this.#due();
  }

  /** Cells that ran or run; the same id replaces what was told before. */
  mark(cells: CellRun[]): void {
    this.#shared.runs.merge(cells, this.#shared.now);
    this.#due();
  }

  /** The doctor's checks, shown where there is no GPU or when these are given; null ends it. */
  diagnose(checks: Check[] | null): void {
    this.#checks = checks;
    this.#due();
  }

  /** What can be done, at a press, about there being no GPU. */
  offer(offer: Offer): void {
    this.#offer = offer;
    this.#due();
  }

  connection({ kind, text }: Connection): void {
    const { t } = this.#shared;
    const words = {
      live: '',
      connecting: t('connecting…'),
      polling: t('no live connection: asking every few seconds'),
      standby: t('standing by'),
      lost: t('connection lost, trying again'),
    };
    this.#all.dataset['kind'] = kind;
    this.#toolbar.state.say(text ?? words[kind]);
  }

  /** The kernel that "this notebook" is. */
  here(kernel: string | null): void {
    if (this.#shared.here === kernel) return;
    this.#shared.here = kernel;
    this.#due();
  }

  results(results: Result[]): void {
    this.#results.update(results);
  }

  /** What this kernel has measured. */
  timings(results: Result[]): void {
    this.#timings.update(results);
  }

  /** What it measures now. */
  timing(now: Timing): void {
    this.#shared.timing = now;
    this.#timings.now(now);
    this.#due();
  }

  /** What this notebook holds, or a word on why that is not known. */
  holdings(held: Holdings | string | null): void {
    this.#shared.holdings = held;
    this.#due();
  }

  options({ density, window }: ViewOptions): void {
    this.#machines.density = density ?? 'auto';
    if (window) {
      this.#shared.window = window;
      this.#shared.series.step = window / POINTS;
    }
    this.#due();
  }

  /** Draws now what is due. */
  draw(): void {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const snapshot = this.#snapshot;
    if (!this.#stale || this.#disposed) return;
    this.#stale = false;
    if (snapshot) {
      this.#machines.update(snapshot);
      this.#toolbar.update(snapshot, this.#machines);
    }
    const none = snapshot !== null && snapshot.gpus.length === 0;
    // What is broken stands above; the rest says why there is no GPU.
    const why = snapshot?.problems.filter((one) => !broken(snapshot).includes(one)) ?? [];
    this.#doctor.update(this.#checks, none ? why : null, this.#offer);
    show(this.#bones, snapshot === null && this.#checks === null);
    if (this.#themed > 0) {
      this.#themed--;
      this.#shared.inks = inks(this.#probe);
    }
    this.#machines.draw();
  }

  /** Ends it: nothing observes or draws any more. */
  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    cancelAnimationFrame(this.#frame);
    this.#machines.dispose();
    this.#endTheme();
    this.#sizes.dispose();
    this.#sight.dispose();
    this.node.remove();
  }

  #build(label: string): void {
    const sheet = h('style', '', CSS + OFFER_CSS);
    this.#bones.append(this.#shared.t('Looking for GPUs…'));
    this.#doctor.node.hidden = true;
    this.#all.setAttribute('role', 'region');
    this.#all.setAttribute('aria-label', label);
    this.#all.append(
      this.#toolbar.node,
      this.#machines.node,
      this.#timings.node,
      this.#results.node,
      this.#tip.node,
      this.#probe,
    );
    this.node.className = 'gpumagic-monitor';
    this.node.attachShadow({ mode: 'open' }).append(sheet, this.#all);
  }

  #want(uuid: string, open: boolean): void {
    const before = this.#wanted.size;
    if (open) this.#wanted.add(uuid);
    else this.#wanted.delete(uuid);
    const { size } = this.#wanted;
    // What is opened once more is asked for once more.
    if (open || (before && !size)) this.#shared.actions.holdings?.(open);
    this.#due();
  }

  #choose(density: Density): void {
    const { actions } = this.#shared;
    this.#machines.density = density;
    actions.density?.(density);
    this.#due();
  }

  #due(): void {
    this.#stale = true;
    if (this.#visible && !this.#frame && !this.#disposed) {
      this.#frame = requestAnimationFrame(() => {
        this.#frame = 0;
        if (this.#visible) this.draw();
      });
    }
  }
}

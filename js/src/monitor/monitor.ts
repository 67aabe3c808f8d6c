/** The live monitor: take snapshots, and draw what is visible with the next frame. */

import type { CellRun, History, Snapshot } from '../snapshot.js';
import { Load } from './bars.js';
import { inks, onTheme, probe, remember, remembered, type Visibility, Watch } from './browser.js';
import { Tip } from './chart.js';
import type { Deaths } from './deaths.js';
import { type Doctor, Problems } from './doctor.js';
import { Field, h, show } from './dom.js';
import { Gpus } from './gpus.js';
import type { OtherHosts } from './hosts.js';
import { broken, drivers } from './names.js';
import { whole } from './owners.js';
import { Results } from './results.js';
import { Runs, Series } from './series.js';
import { english, type Options, type Shared, type State } from './shared.js';
import type { Inks } from './spark.js';
import { CSS } from './style.js';

/** The most samples in a chart: it has fewer pixels. */
const POINTS = 800;

/** The line on top: the machine, the connection, and tools. */
class Toolbar {
  readonly node: HTMLElement;
  #host = new Field('span', 'host dim');
  #load = new Load();
  #state = new Field('span', 'state dim');
  #shared: Shared;

  constructor(shared: Shared) {
    this.#shared = shared;
    this.#state.node.setAttribute('role', 'status');
    const tools = shared.extras?.tools(shared) ?? [];
    this.node = h('div', 'top', this.#host.node, this.#state.node, ...tools, this.#load.node);
  }

  /** `instead`: a summary of several hosts, each of which has its name above its GPUs. */
  update(snapshot: Snapshot, instead: string): void {
    const { trans } = this.#shared;
    const text = [snapshot.host.name, ...drivers(snapshot, trans)].filter(Boolean).join(' · ');
    const { driver } = snapshot;
    this.#host.textOrHide(instead || text).title(driver ? trans.__('driver %1', driver) : '');
    show(this.#load.node, !instead);
    if (!instead) this.#load.update(snapshot.host);
  }

  connect(): void {
    const { trans, connection } = this.#shared;
    const { kind, text } = connection;
    const other = { connecting: trans.__('connecting…'), standby: trans.__('paused') }[
      kind as string
    ];
    this.#state.text(text ?? other ?? '');
  }
}

export class Monitor {
  readonly node = document.createElement('div');
  #shared: Shared;
  #all = h('div', 'all');
  #toolbar: Toolbar;
  #doctor: Doctor | null;
  #problems = new Problems();
  #deaths: Deaths | null;
  #gpus: Gpus;
  #others: OtherHosts | null;
  #own = h('div');
  #hosts = h('div', '', this.#own);
  #none = h('p', 'dim');
  #timings: Results;
  #results: Results;
  #loading = h('div', 'loading dim');
  #tip = new Tip(this.#all);
  #probe = probe();
  #sizes = new Watch<ResizeObserverEntry>(globalThis.ResizeObserver, () => this.#redraw());
  #visibility: Visibility = new Watch(globalThis.IntersectionObserver);
  #endTheme: () => void;
  #snapshot: Snapshot | null = null;
  #visible = true;
  #stale = true;
  #themed = 2;
  #frame = 0;
  #disposed = false;

  constructor(options: Options = {}) {
    const { actions = {}, translate: trans = english, label, extras = null } = options;
    this.#shared = {
      ...{ trans, actions, extras, here: null, window: 120, now: 0 },
      ...{ hosts: [], checks: null, offer: null, variables: null },
      ...{ timing: {}, timings: [], results: [], opened: new Set() },
      connection: { kind: 'connecting' },
      series: new Series(),
      runs: new Runs(),
      inks: {} as Inks,
      open: remembered(),
      watch: (spark) => this.#sizes.add(spark.node, (entry) => spark.resize(entry.contentRect)),
      unwatch: (spark) => this.#sizes.remove(spark.node),
      tip: (at, lines, spoken) => this.#tip.point(at, lines, spoken),
      toggled: () => remember(this.#shared.open),
      redraw: () => this.#redraw(),
    };
    this.#toolbar = new Toolbar(this.#shared);
    this.#gpus = new Gpus(this.#shared, this.#visibility);
    this.#doctor = extras?.doctor(this.#shared) ?? null;
    this.#others = extras?.hosts(this.#shared, this.#visibility) ?? null;
    this.#deaths = extras?.deaths(this.#shared) ?? null;
    const { node, notebooks } = this.#gpus;
    this.#own.append(this.#problems.node, notebooks.node, this.#none, this.#loading, node);
    if (this.#deaths) this.#own.prepend(this.#deaths.node);
    if (this.#others) this.#own.prepend(this.#others.head);
    if (this.#others) this.#hosts.append(this.#others.node);
    if (this.#doctor) this.#none.replaceWith(this.#doctor.node);
    this.#none.append(trans.__('No GPU is visible here.'));
    for (const hidden of [this.#none, node, notebooks.node]) show(hidden, false);
    this.#timings = new Results(trans.__('Timings'));
    this.#results = new Results(trans.__('Results'));
    this.#loading.append(trans.__('Looking for GPUs…'));
    this.#all.setAttribute('role', 'region');
    this.#all.ariaLabel = label ?? trans.__('GPU monitor');
    const parts = [this.#timings, this.#results, this.#tip].map(({ node }) => node);
    this.#all.append(this.#toolbar.node, this.#hosts, ...parts, this.#probe);
    this.node.className = 'gpumagic-monitor';
    this.node
      .attachShadow({ mode: 'open' })
      .append(h('style', '', CSS + (extras?.css ?? '')), this.#all);
    this.#endTheme = onTheme(() => {
      // A theme's style sheet may load after its name changes.
      this.#themed = 2;
      this.#redraw();
    });
    this.#visibility.add(this.node, ({ isIntersecting }) => {
      this.#visible = isIntersecting;
      if (isIntersecting) this.#redraw();
    });
    this.set({});
  }

  update(snapshot: Snapshot): void {
    this.#snapshot = snapshot;
    this.#shared.now = snapshot.time;
    this.#shared.series.push(this.#others?.together(snapshot) ?? snapshot);
    this.#redraw();
  }

  /** Replace the samples of the history's time span. */
  seed(history: History): void {
    this.#shared.series.seed(history);
    this.#redraw();
  }

  /** Add cells that ran or are running; a cell with a known id is replaced. */
  mark(cells: CellRun[]): void {
    this.#shared.runs.merge(cells, this.#shared.now);
    this.#redraw();
  }

  /** Change everything that is not a snapshot. */
  set(state: Partial<State>): void {
    const shared = Object.assign(this.#shared, state);
    shared.series.step = shared.window / POINTS;
    // These change rarely, and need no snapshot.
    this.#all.dataset['kind'] = shared.connection.kind;
    this.#toolbar.connect();
    this.#timings.update(shared.timings, shared.timing);
    this.#results.update(shared.results);
    this.#redraw();
  }

  /** Draw now, if anything changed. */
  draw(): void {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const snapshot = this.#snapshot;
    if (!this.#stale || this.#disposed) return;
    this.#stale = false;
    if (snapshot) this.#write(snapshot);
    else this.#doctor?.update(null);
    show(this.#loading, snapshot === null && this.#shared.checks === null);
    if (this.#themed > 0) {
      this.#themed--;
      this.#shared.inks = inks(this.#probe);
    }
    this.#gpus.draw();
    this.#others?.draw();
  }

  #write(snapshot: Snapshot): void {
    const total = whole((this.#others?.together(snapshot) ?? snapshot).gpus).length;
    const none = !snapshot.gpus.length;
    const wrong = broken(snapshot);
    // The doctor shows the problems that only explain why there is no GPU.
    this.#problems.update(this.#doctor ? wrong : snapshot.problems);
    this.#doctor?.update(none ? snapshot.problems.filter((one) => !wrong.includes(one)) : null);
    this.#deaths?.update(snapshot.events);
    this.#gpus.update(snapshot, total);
    this.#others?.update(snapshot, total);
    this.#toolbar.update(snapshot, this.#others?.summarize(total) ?? '');
    show(this.#gpus.node, !none);
    show(this.#none, none);
    // GPUs elsewhere come before the reason why there are none here.
    const elsewhere = none && this.#shared.hosts.length > 0;
    const first = (elsewhere && this.#others?.node) || this.#own;
    if (this.#hosts.firstChild !== first) this.#hosts.prepend(first);
  }

  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    cancelAnimationFrame(this.#frame);
    this.#gpus.dispose();
    this.#others?.dispose();
    this.#endTheme();
    this.#sizes.dispose();
    this.#visibility.dispose();
    this.node.remove();
  }

  #redraw(): void {
    this.#stale = true;
    if (!this.#visible || this.#frame || this.#disposed) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      if (this.#visible) this.draw();
    });
  }
}

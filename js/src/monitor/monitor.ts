/** The live monitor: take snapshots, and draw what is visible with the next frame. */

import type { CellRun, History, OtherHost, Snapshot } from '../snapshot.js';
import { inks, Opened, probe } from './browser.js';
import { Tip } from './chart.js';
import { button, Field, h, icon, Rows, show } from './dom.js';
import { FEW, Machine, type MachineItem } from './machine.js';
import { whole } from './owners.js';
import { Past } from './past.js';
import { Results } from './results.js';
import { english, type Options, type Part, type Shared, type State } from './shared.js';
import type { Inks } from './spark.js';
import { CSS } from './style.js';

/** The most samples in a chart: it has fewer pixels. */
const POINTS = 800;
/** The key of the host that sends the snapshots. */
const OWN = 'own';

export class Monitor {
  readonly node = h('div', 'gpumagic-monitor');
  #shared: Shared;
  #all = h('div', 'all');
  #state = new Field('p', 'state dim');
  #loading: HTMLElement;
  #parts: Part[];
  #machines: Rows<MachineItem, Machine>;
  #timings: Results;
  #results: Results;
  #tip = new Tip(this.#all);
  #probe = probe();
  #size = new ResizeObserver(() => this.#redraw());
  #sight = new IntersectionObserver((entries) => {
    this.#visible = entries.at(-1)?.isIntersecting ?? true;
    if (this.#visible) this.#redraw();
  });
  #snapshot: Snapshot | null = null;
  #visible = true;
  #stale = true;
  #frame = 0;
  #disposed = false;

  constructor(options: Options = {}) {
    const { actions = {}, translate: trans = english, label, extras = null } = options;
    this.#shared = {
      ...{ trans, actions, extras, here: null, window: 120, now: 0 },
      ...{ hosts: [], checks: null, offer: null, variables: null },
      ...{ timing: {}, timings: [], results: [] },
      connection: { kind: 'connecting' },
      past: options.past ?? new Past(),
      inks: {} as Inks,
      opened: new Opened(() => this.#redraw()),
      tip: (at, lines, spoken) => this.#tip.point(at, lines, spoken),
      redraw: () => this.#redraw(),
    };
    this.#parts = extras?.parts(this.#shared) ?? [];
    this.#machines = new Rows(
      h('div'),
      ({ key }) => new Machine(this.#shared, key === OWN ? this.#parts : []),
    );
    this.#timings = new Results(trans.__('Timings'));
    this.#results = new Results(trans.__('Results'));
    this.#state.node.setAttribute('role', 'status');
    this.#loading = h('p', 'dim', trans.__('Looking for GPUs…'));
    const all = [this.#state, this.#machines, this.#timings, this.#results, this.#tip];
    this.#all.append(...all.map(({ node }) => node), this.#probe);
    this.#all.prepend(this.#loading);
    if (actions.page) {
      const page = button('tool', actions.page, icon('M9 3h4v4M13 3l-5 5M7 4h-4v9h9v-4'));
      page.title = page.ariaLabel = trans.__('Open as a page');
      this.#all.prepend(page);
    }
    this.#all.setAttribute('role', 'region');
    this.#all.ariaLabel = label ?? trans.__('GPU monitor');
    const root = this.node.attachShadow({ mode: 'open' });
    root.append(h('style', '', CSS + (extras?.css ?? '')), this.#all);
    this.#size.observe(this.#all);
    this.#sight.observe(this.node);
    this.set({});
  }

  update(snapshot: Snapshot): void {
    this.#snapshot = snapshot;
    this.#shared.now = snapshot.time;
    const all = [snapshot, ...this.#shared.hosts.map((host) => host.snapshot)];
    // Samples of all hosts have the time of the server's.
    this.#shared.past.push({
      time: snapshot.time,
      gpus: all.flatMap(({ gpus }) => gpus),
      processes: all.flatMap(({ processes }) => processes),
    });
    this.#redraw();
  }

  /** Replace the samples of the history's time span. */
  seed(history: History): void {
    this.#shared.past.seed(history);
    this.#redraw();
  }

  /** Add cells that ran or are running; a cell with a known id is replaced. */
  mark(cells: CellRun[]): void {
    this.#shared.past.mark(cells, this.#shared.now);
    this.#redraw();
  }

  /** Change everything that is not a snapshot. */
  set(state: Partial<State>): void {
    const shared = Object.assign(this.#shared, state);
    const { trans, connection, window, past } = shared;
    past.step = window / POINTS;
    // These change rarely, and need no snapshot.
    this.#all.dataset['kind'] = connection.kind;
    const [connecting, standby] = [trans.__('connecting…'), trans.__('paused')];
    const words = { connecting, standby, live: '', lost: '' };
    this.#state.text(connection.text ?? words[connection.kind]);
    this.#timings.update(shared.timings, shared.timing);
    this.#results.update(shared.results);
    this.#redraw();
  }

  /** Draw now, if anything changed. */
  draw(): void {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (!this.#stale || this.#disposed) return;
    this.#stale = false;
    // Read before anything is written, so that the page is laid out once.
    this.#shared.inks = inks(this.#probe);
    show(this.#loading, this.#snapshot === null);
    if (this.#snapshot) this.#machines.update(this.#items(this.#snapshot), ({ key }) => key);
    for (const machine of this.#machines.rows) machine.draw();
    this.#tip.tidy();
  }

  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    cancelAnimationFrame(this.#frame);
    this.#size.disconnect();
    this.#sight.disconnect();
    this.node.remove();
  }

  /** Return all hosts, the server's first unless only others have GPUs. */
  #items(snapshot: Snapshot): MachineItem[] {
    const own: OtherHost = { key: OWN, snapshot, silent: 0 };
    const { hosts } = this.#shared;
    const all = snapshot.gpus.length ? [own, ...hosts] : [...hosts, own];
    const count = whole(all.flatMap((host) => host.snapshot.gpus)).length;
    return all.map((host) => ({ ...host, alone: !hosts.length, few: count <= FEW }));
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

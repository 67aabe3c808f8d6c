/** Feed the monitors of this page from one stream, which sends more while one is visible. */

import type { Monitor } from '../monitor/monitor.js';
import type { State } from '../monitor/shared.js';
import type { Change, Stream } from './stream.js';

export class Feeds {
  #stream: Pick<Stream, 'latest' | 'subscribe'>;
  #change: Change;
  /** Whether each monitor is visible. */
  #monitors = new Map<Monitor, () => boolean>();
  #state: Partial<State> = {};
  #period = 1;

  constructor(stream: Pick<Stream, 'latest' | 'subscribe'>) {
    this.#stream = stream;
    this.#change = stream.subscribe(
      {
        snapshot: (snapshot) => this.#each((monitor) => monitor.update(snapshot)),
        history: (history) => this.#each((monitor) => monitor.seed(history)),
        cells: (cells) => this.#each((monitor) => monitor.mark(cells)),
        connection: (connection) => this.set({ connection }),
      },
      null,
    );
  }

  /** Feed a monitor until `remove`. */
  add(monitor: Monitor, isVisible: () => boolean): void {
    monitor.set(this.#state);
    const { latest } = this.#stream;
    if (latest) monitor.update(latest);
    this.#monitors.set(monitor, isVisible);
    this.changeWant();
  }

  remove(monitor: Monitor): void {
    this.#monitors.delete(monitor);
    this.changeWant();
  }

  /** Change the state of all monitors, present and future. */
  set(state: Partial<State>): void {
    Object.assign(this.#state, state);
    this.#each((monitor) => monitor.set(state));
  }

  /** Change the seconds between snapshots. */
  setPeriod(period: number): void {
    this.#period = period;
    this.changeWant();
  }

  /** Request snapshots if a monitor is visible. */
  changeWant(): void {
    const want = { period: this.#period, processes: true, history: true };
    this.#change(this.anyVisible ? want : null);
  }

  get anyVisible(): boolean {
    return [...this.#monitors.values()].some((isVisible) => isVisible());
  }

  #each(call: (monitor: Monitor) => void): void {
    for (const monitor of this.#monitors.keys()) call(monitor);
  }
}

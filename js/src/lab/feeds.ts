/** Feed the monitors of this page from one stream; a monitor that is not visible wants nothing. */

import type { Monitor } from '../monitor/monitor.js';
import type { State } from '../monitor/shared.js';
import type { HistoryMessage } from '../snapshot.js';
import type { Stream, Subscription } from './stream.js';

interface View {
  isVisible(): boolean;
  subscription: Subscription;
}

export class Feeds {
  #stream: Pick<Stream, 'subscribe'>;
  #get: <T>(path: string) => Promise<T>;
  #views = new Map<Monitor, View>();
  #state: Partial<State> = {};
  #period = 1;
  #fed = false;

  constructor(stream: Pick<Stream, 'subscribe'>, get: <T>(path: string) => Promise<T>) {
    this.#stream = stream;
    this.#get = get;
  }

  /** Feed a monitor until `remove`. */
  add(monitor: Monitor, isVisible: () => boolean): void {
    monitor.set(this.#state);
    const subscription = this.#stream.subscribe(
      {
        snapshot: (snapshot) => monitor.update(snapshot),
        history: (history) => monitor.seed(history),
        cells: (cells) => monitor.mark(cells),
        connection: (connection) => monitor.set({ connection }),
      },
      null,
    );
    this.#views.set(monitor, { isVisible, subscription });
    // The stream delivers the past only once, to the first monitor.
    if (this.#fed) void this.#past(monitor);
    this.#fed = true;
    this.look();
  }

  async #past(monitor: Monitor): Promise<void> {
    const past = await this.#get<HistoryMessage>('history').catch(() => null);
    if (!past || !this.#views.has(monitor)) return;
    monitor.seed(past.history);
    monitor.mark(past.cells);
  }

  remove(monitor: Monitor): void {
    this.#views.get(monitor)?.subscription.close();
    this.#views.delete(monitor);
  }

  /** Change the state of all monitors, present and future. */
  set(state: Partial<State>): void {
    Object.assign(this.#state, state);
    for (const monitor of this.#views.keys()) monitor.set(state);
  }

  /** Change the seconds between snapshots. */
  setPeriod(period: number): void {
    this.#period = period;
    this.look();
  }

  /** Want snapshots for the visible monitors. */
  look(): void {
    const want = { period: this.#period, processes: true, history: true };
    for (const { isVisible, subscription } of this.#views.values())
      subscription.change(isVisible() ? want : null);
  }

  isVisible(monitor: Monitor): boolean {
    return this.#views.get(monitor)?.isVisible() ?? false;
  }

  get anyVisible(): boolean {
    return [...this.#views.values()].some(({ isVisible }) => isVisible());
  }
}

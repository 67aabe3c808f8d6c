/** The monitors of this page: each is fed from the one stream, and wants nothing while not seen. */

import type { ViewOptions } from '../monitor/monitor.js';
import type { OtherHost, Snapshot } from '../snapshot.js';
import type { Subscription } from './audience.js';
import type { Deferred } from './deferred.js';
import { toPast } from './messages.js';
import type { Stream } from './stream.js';

type Fed = Pick<Deferred, 'update' | 'seed' | 'mark' | 'connection' | 'here' | 'options' | 'hosts'>;

export class Feeds {
  #stream: Pick<Stream, 'subscribe'>;
  #get: (path: string) => Promise<unknown>;
  #fed = new Map<Fed, { look: () => void; close: () => void; isSeen: () => boolean }>();
  #looked: () => void;
  #here: string | null = null;
  #options: ViewOptions = {};
  #period = 1;
  #hosts: OtherHost[] = [];

  /** `looked` is called when some of them may have come to be seen. */
  constructor(
    stream: Pick<Stream, 'subscribe'>,
    get: (path: string) => Promise<unknown>,
    looked: () => void = () => {},
  ) {
    this.#stream = stream;
    this.#get = get;
    this.#looked = looked;
  }

  /** Feeds a monitor, until `remove`; `also` gets each snapshot too. */
  add(monitor: Fed, isSeen: () => boolean, also?: (snapshot: Snapshot) => void): void {
    monitor.here(this.#here);
    monitor.options(this.#options);
    monitor.hosts(this.#hosts);
    const subscription: Subscription = this.#stream.subscribe(
      {
        snapshot: (snapshot) => {
          monitor.update(snapshot);
          also?.(snapshot);
        },
        history: (history) => monitor.seed(history),
        cells: (cells) => monitor.mark(cells),
        connection: (connection) => monitor.connection(connection),
      },
      null,
    );
    const look = () =>
      subscription.change(
        isSeen() ? { period: this.#period, processes: true, history: true } : null,
      );
    this.#fed.set(monitor, { look, close: () => subscription.close(), isSeen });
    look();
  }

  /** For one that comes late: the stream tells the past only once. */
  async past(monitor: Fed): Promise<void> {
    const past = toPast(await this.#get('history').catch(() => null));
    if (!past || !this.#fed.has(monitor)) return;
    monitor.seed(past.history);
    monitor.mark(past.cells);
  }

  remove(monitor: Fed): void {
    this.#fed.get(monitor)?.close();
    this.#fed.delete(monitor);
  }

  /** Some of them came to be seen, or not. */
  look(): void {
    for (const { look } of this.#fed.values()) look();
    this.#looked();
  }

  isSeen(monitor: unknown): boolean {
    return this.#fed.get(monitor as Fed)?.isSeen() ?? false;
  }

  /** Whether any of them is seen. */
  get seen(): boolean {
    return [...this.#fed.values()].some(({ isSeen }) => isSeen());
  }

  hosts(hosts: OtherHost[]): void {
    this.#hosts = hosts;
    for (const monitor of this.#fed.keys()) monitor.hosts(hosts);
  }

  here(kernel: string | null): void {
    this.#here = kernel;
    for (const monitor of this.#fed.keys()) monitor.here(kernel);
  }

  options(options: ViewOptions, period: number): void {
    this.#options = options;
    this.#period = period;
    for (const monitor of this.#fed.keys()) monitor.options(options);
    this.look();
  }
}

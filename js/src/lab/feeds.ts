/** Feed the monitors of this page from one stream. */

import type { Monitor, Options, ViewOptions } from '../monitor/monitor.js';
import type { Translate } from '../monitor/shared.js';
import type { OtherHost, Snapshot } from '../snapshot.js';
import { type Subscription, toPast } from './audience.js';
import type { Stream } from './stream.js';

/** What the fetched file has. */
export interface Renderer {
  Monitor: new (options: Options) => Monitor;
}

type Told = Pick<
  Monitor,
  | 'update'
  | 'seed'
  | 'mark'
  | 'diagnose'
  | 'offer'
  | 'connection'
  | 'here'
  | 'options'
  | 'timings'
  | 'holdings'
  | 'hosts'
>;
/** Of these, what was told last is not all there is to know. */
const ADDS = new Set<keyof Told>(['seed', 'mark']);

export class Deferred implements Told {
  readonly node = document.createElement('div');
  #fetch: (attempt: number) => Promise<Renderer>;
  #options: Options;
  #t: Translate;
  #word = document.createElement('p');
  #monitor: Monitor | null = null;
  #waiting: { name: keyof Told; call: (monitor: Monitor) => void }[] = [];
  #attempts = 0;
  #fetching = false;
  #disposed = false;

  /** `fetch` gets how often it was tried: a browser may remember for good what failed. */
  constructor(fetch: (attempt: number) => Promise<Renderer>, options: Options, t: Translate) {
    this.#fetch = fetch;
    this.#options = options;
    this.#t = t;
    this.#word.setAttribute('role', 'status');
    Object.assign(this.#word.style, { color: 'var(--jp-ui-font-color2)', margin: '12px' });
    this.node.append(this.#word);
  }

  /** Fetches the code, if it is not there yet; to be called again where that failed. */
  async load(): Promise<void> {
    if (this.#monitor || this.#fetching || this.#disposed) return;
    this.#fetching = true;
    this.#word.textContent = this.#t('connecting…');
    try {
      const { Monitor } = await this.#fetch(this.#attempts++);
      if (!this.#disposed) this.#begin(new Monitor(this.#options));
    } catch {
      this.#word.textContent = this.#t(
        'gpumagic does not answer on this server. Is it there (jupyter server extension list)?',
      );
    } finally {
      this.#fetching = false;
    }
  }

  update(...said: Parameters<Told['update']>): void {
    this.#tell('update', (monitor) => monitor.update(...said));
  }

  seed(...said: Parameters<Told['seed']>): void {
    this.#tell('seed', (monitor) => monitor.seed(...said));
  }

  mark(...said: Parameters<Told['mark']>): void {
    this.#tell('mark', (monitor) => monitor.mark(...said));
  }

  diagnose(...said: Parameters<Told['diagnose']>): void {
    this.#tell('diagnose', (monitor) => monitor.diagnose(...said));
  }

  offer(...said: Parameters<Told['offer']>): void {
    this.#tell('offer', (monitor) => monitor.offer(...said));
  }

  connection(...said: Parameters<Told['connection']>): void {
    this.#tell('connection', (monitor) => monitor.connection(...said));
    if (this.#monitor) return;
    const [{ kind, text }] = said;
    if (text) this.#word.textContent = text;
    // What kept the code from being fetched is over.
    if (this.#attempts && (kind === 'live' || kind === 'polling')) void this.load();
  }

  here(...said: Parameters<Told['here']>): void {
    this.#tell('here', (monitor) => monitor.here(...said));
  }

  timings(...said: Parameters<Told['timings']>): void {
    this.#tell('timings', (monitor) => monitor.timings(...said));
  }

  holdings(...said: Parameters<Told['holdings']>): void {
    this.#tell('holdings', (monitor) => monitor.holdings(...said));
  }

  hosts(...said: Parameters<Told['hosts']>): void {
    this.#tell('hosts', (monitor) => monitor.hosts(...said));
  }

  options(...said: Parameters<Told['options']>): void {
    this.#tell('options', (monitor) => monitor.options(...said));
  }

  dispose(): void {
    this.#disposed = true;
    this.#waiting = [];
    this.#monitor?.dispose();
  }

  #tell(name: keyof Told, call: (monitor: Monitor) => void): void {
    if (this.#disposed) return;
    if (this.#monitor) {
      call(this.#monitor);
      return;
    }
    if (!ADDS.has(name)) this.#waiting = this.#waiting.filter((one) => one.name !== name);
    this.#waiting.push({ name, call });
  }

  #begin(monitor: Monitor): void {
    this.#monitor = monitor;
    for (const { call } of this.#waiting) call(monitor);
    this.#waiting = [];
    this.#word.replaceWith(monitor.node);
  }
}

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

/**
 * Share one connection to the server between all views of this page.
 *
 * It is a websocket, closed while nobody wants anything. It reconnects by itself, and then requests
 * what it missed. While it is cut again and again, each attempt requests one snapshot instead.
 */

import type { Connection, Translate } from '../monitor/shared.js';
import { english } from '../monitor/shared.js';
import type { CellRun, History, Message, Snapshot, Want } from '../snapshot.js';

/** The part of a WebSocket that is used. */
export type Socket = Pick<
  WebSocket,
  'readyState' | 'send' | 'close' | 'onopen' | 'onmessage' | 'onclose'
>;

/** Access to the server and the browser, which tests replace. */
export interface World {
  socket(): Socket;
  get<T>(path: string): Promise<T>;
  hidden(): boolean;
  /** Calls when the page is hidden or shown, or the network returns. */
  watch(changed: () => void): void;
  after(milliseconds: number, then: () => void): () => void;
  /** Milliseconds. */
  now(): number;
  /** From 0 to 1. */
  random(): number;
}

/** A page that is hidden for longer gets no data. */
const HIDDEN_MS = 10_000;
/** A socket that lived for longer was not cut by a proxy. */
const STABLE_MS = 10_000;
const FIRST_RETRY_MS = 1000;
const LAST_RETRY_MS = 30_000;

export interface Listener {
  snapshot?(snapshot: Snapshot): void;
  history?(history: History): void;
  cells?(cells: CellRun[]): void;
  connection?(connection: Connection): void;
}

export interface Subscription {
  change(want: Want | null): void;
  close(): void;
}

/** Timers by name; a new one replaces the old one of the same name. */
class Timers {
  #after: (milliseconds: number, then: () => void) => () => void;
  #ends = new Map<string, () => void>();

  constructor(after: (milliseconds: number, then: () => void) => () => void) {
    this.#after = after;
  }

  start(name: string, milliseconds: number, then: () => void): void {
    this.end(name);
    const end = this.#after(milliseconds, () => {
      this.#ends.delete(name);
      then();
    });
    this.#ends.set(name, end);
  }

  runs(name: string): boolean {
    return this.#ends.has(name);
  }

  end(...names: string[]): void {
    for (const name of names) {
      this.#ends.get(name)?.();
      this.#ends.delete(name);
    }
  }
}

export class Stream {
  #world: World;
  #trans: Translate;
  /** A listener without a want gets what the others request. */
  #wants = new Map<Listener, Want | null>();
  #timers: Timers;
  #state: Connection = { kind: 'standby' };
  #latest: Snapshot | null = null;
  /** The page has been hidden for long. */
  #hidden = false;
  #socket: Socket | null = null;
  #openedAt = 0;
  /** The socket has delivered a message. */
  #alive = false;
  #failures = 0;
  #probing = false;
  /** The last request on this socket. */
  #sent = '';
  /** The time up to which the past is known; null if it is unknown. */
  #known: number | null = null;
  /** The past was requested on this socket, and has arrived. */
  #requested = false;
  #arrived = false;

  constructor(world: World, trans: Translate = english) {
    this.#world = world;
    this.#trans = trans;
    this.#timers = new Timers((milliseconds, then) => world.after(milliseconds, then));
    world.watch(() => this.#onVisibility());
    this.#onVisibility();
  }

  get latest(): Snapshot | null {
    return this.#latest;
  }

  /** Add a listener, and tell it the latest snapshot and the state. */
  subscribe(listener: Listener, want: Want | null): Subscription {
    if (this.#latest) listener.snapshot?.(this.#latest);
    const before = this.#state;
    this.#wants.set(listener, want);
    this.#reconcile();
    if (this.#state === before) listener.connection?.(before);
    return {
      change: (next) => {
        if (!this.#wants.has(listener)) return;
        this.#wants.set(listener, next);
        this.#reconcile();
      },
      close: () => {
        if (this.#wants.delete(listener)) this.#reconcile();
      },
    };
  }

  #each(call: (listener: Listener) => void): void {
    for (const listener of [...this.#wants.keys()]) call(listener);
  }

  /** Give all listeners a snapshot from elsewhere. */
  show(snapshot: Snapshot): void {
    this.#latest = snapshot;
    this.#each((listener) => listener.snapshot?.(snapshot));
  }

  #onVisibility(): void {
    this.#timers.end('hidden');
    if (this.#world.hidden()) {
      this.#timers.start('hidden', HIDDEN_MS, () => {
        this.#hidden = true;
        this.#reconcile();
      });
      return;
    }
    this.#hidden = false;
    this.#timers.end('retry');
    this.#reconcile();
  }

  /** Return the shortest period and everything that anybody wants; null if nobody wants anything. */
  #want(): Want | null {
    const wants = [...this.#wants.values()].filter((want) => want !== null);
    if (this.#hidden || !wants.length) return null;
    return {
      period: Math.min(...wants.map((want) => want.period)),
      processes: wants.some((want) => want.processes),
      history: wants.some((want) => want.history),
    };
  }

  /** Open, close or update the connection, as the listeners want. */
  #reconcile(): void {
    if (!this.#want()) this.#stop();
    else if (this.#socket) this.#request();
    else if (!this.#timers.runs('retry') && !this.#probing) this.#open();
  }

  #stop(): void {
    this.#timers.end('retry', 'silence');
    this.#probing = false;
    this.#failures = 0;
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
    this.#setState({ kind: 'standby' });
  }

  #open(): void {
    this.#alive = this.#requested = this.#arrived = false;
    this.#sent = '';
    this.#openedAt = this.#world.now();
    if (!this.#failures) this.#setState({ kind: 'connecting' });
    const socket = this.#world.socket();
    this.#socket = socket;
    socket.onopen = () => this.#socket === socket && this.#request();
    socket.onmessage = (event) => this.#socket === socket && this.#onMessage(event.data);
    socket.onclose = () => this.#onClose(socket);
    this.#expect();
  }

  /** Close the socket if it delivers nothing for long. */
  #expect(): void {
    const socket = this.#socket;
    const period = this.#want()?.period ?? 1;
    this.#timers.start('silence', (3 * period + 5) * 1000, () => {
      if (!socket) return;
      socket.close();
      this.#onClose(socket);
    });
  }

  #request(): void {
    const want = this.#want();
    if (this.#socket?.readyState !== 1 || !want) return;
    const past = want.history && !this.#requested;
    const message = { type: 'want', period: want.period, processes: want.processes };
    const text = JSON.stringify(message);
    if (text === this.#sent && !past) return;
    this.#sent = text;
    if (past) this.#requested = true;
    this.#socket.send(past ? JSON.stringify({ ...message, since: this.#known }) : text);
    this.#expect();
  }

  #onMessage(data: string): void {
    this.#expect();
    if (!this.#alive) {
      this.#alive = true;
      this.#probing = false;
      this.#timers.end('retry');
      this.#setState({ kind: 'live' });
    }
    this.#take(JSON.parse(data));
  }

  #take(message: Message): void {
    if (message.type === 'snapshot') {
      // Before the history arrives there is a gap, which may have to be requested again.
      if (this.#arrived) this.#known = message.snapshot.time;
      this.show(message.snapshot);
      return;
    }
    if (message.type === 'history') {
      this.#arrived = true;
      this.#known = message.history.time.at(-1) ?? this.#known;
      this.#each((listener) => listener.history?.(message.history));
    }
    this.#each((listener) => listener.cells?.(message.cells));
  }

  #onClose(socket: Socket): void {
    if (this.#socket !== socket) return;
    this.#socket = null;
    this.#timers.end('silence');
    const lasted = this.#alive && this.#world.now() - this.#openedAt >= STABLE_MS;
    this.#failures = lasted ? 0 : this.#failures + 1;
    if (this.#failures > 1) void this.#probe();
    else {
      this.#setState({ kind: 'connecting' });
      this.#retry();
    }
  }

  /** Double the wait after each failure; the random part spreads the pages of many users. */
  #retry(): void {
    const wait = Math.min(LAST_RETRY_MS, FIRST_RETRY_MS * 2 ** Math.max(0, this.#failures - 1));
    this.#timers.start('retry', wait * (0.5 + this.#world.random() / 2), () => this.#open());
  }

  /** Find out whether the socket or the server fails, and try again. */
  async #probe(): Promise<void> {
    this.#probing = true;
    let status = 0;
    const snapshot = await this.#world.get<Snapshot>('snapshot').catch((error: unknown) => {
      status = (error as { status?: number } | null)?.status ?? 0;
      return null;
    });
    // A socket has delivered since, or nobody wants anything any more.
    if (!this.#probing) return;
    this.#probing = false;
    if (snapshot) this.show(snapshot);
    const cut = this.#trans.__('A proxy cuts the connection; trying again.');
    this.#setState(
      snapshot
        ? { kind: 'connecting', text: cut }
        : { kind: 'lost', text: reason(status, this.#trans) },
    );
    this.#retry();
  }

  #setState(state: Connection): void {
    if (state.kind === this.#state.kind && state.text === this.#state.text) return;
    this.#state = state;
    this.#each((listener) => listener.connection?.(state));
  }
}

/** Return why the server does not answer, by HTTP's status; 0 if it is unknown. */
function reason(status: number, trans: Translate): string {
  if (status === 401 || status === 403) return trans.__('The server refuses: log in again.');
  if (status !== 404) return trans.__('No connection to the Jupyter server; trying again.');
  return trans.__(
    'The Jupyter server has no gpumagic: pip install gpumagic there, then restart it.',
  );
}

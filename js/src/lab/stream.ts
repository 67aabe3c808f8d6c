/**
 * Share one connection to the server between all views of this page.
 *
 * It is a websocket, closed while nobody wants anything. It reconnects by itself, and then requests
 * what it missed. Before each attempt it requests one snapshot, which tells why the socket failed,
 * and takes its place while a proxy cuts sockets.
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
export interface Environment {
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

/** Changes what a listener wants. */
export type Change = (want: Want | null) => void;

/** A timer; a new start ends the old one. */
class Timer {
  #after: Environment['after'];
  #end: (() => void) | null = null;

  constructor(after: Environment['after']) {
    this.#after = after;
  }

  get runs(): boolean {
    return this.#end !== null;
  }

  start(milliseconds: number, then: () => void): void {
    this.end();
    this.#end = this.#after(milliseconds, () => {
      this.#end = null;
      then();
    });
  }

  end(): void {
    this.#end?.();
    this.#end = null;
  }
}

export class Stream {
  #environment: Environment;
  #trans: Translate;
  /** A listener without a want gets what the others request. */
  #wants = new Map<Listener, Want | null>();
  #retry: Timer;
  #silence: Timer;
  #hide: Timer;
  #state: Connection = { kind: 'standby' };
  #latest: Snapshot | null = null;
  /** The page has been hidden for long. */
  #hidden = false;
  #socket: Socket | null = null;
  #openedAt = 0;
  #failures = 0;
  #probing = false;
  /** The last request on this socket. */
  #sent = '';
  /** The time up to which the past is known; null if it is unknown. */
  #known: number | null = null;
  /** The state of the past on this socket. */
  #past: 'unasked' | 'requested' | 'arrived' = 'unasked';

  constructor(environment: Environment, trans: Translate = english) {
    this.#environment = environment;
    this.#trans = trans;
    const timer = () => new Timer((milliseconds, then) => environment.after(milliseconds, then));
    [this.#retry, this.#silence, this.#hide] = [timer(), timer(), timer()];
    environment.watch(() => this.#onVisibility());
    this.#onVisibility();
  }

  get latest(): Snapshot | null {
    return this.#latest;
  }

  /** Add a listener, tell it the latest snapshot and the state, and return how to change its want. */
  subscribe(listener: Listener, want: Want | null): Change {
    if (this.#latest) listener.snapshot?.(this.#latest);
    listener.connection?.(this.#state);
    this.#wants.set(listener, want);
    this.#reconcile();
    return (next) => {
      this.#wants.set(listener, next);
      this.#reconcile();
    };
  }

  #each(call: (listener: Listener) => void): void {
    for (const listener of this.#wants.keys()) call(listener);
  }

  /** Give all listeners a snapshot from elsewhere. */
  show(snapshot: Snapshot): void {
    this.#latest = snapshot;
    this.#each((listener) => listener.snapshot?.(snapshot));
  }

  #onVisibility(): void {
    this.#hide.end();
    if (this.#environment.hidden()) {
      this.#hide.start(HIDDEN_MS, () => {
        this.#hidden = true;
        this.#reconcile();
      });
      return;
    }
    this.#hidden = false;
    this.#retry.end();
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
    else if (!this.#retry.runs && !this.#probing) this.#open();
  }

  #stop(): void {
    this.#retry.end();
    this.#silence.end();
    this.#probing = false;
    this.#failures = 0;
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
    this.#setState({ kind: 'standby' });
  }

  #open(): void {
    this.#past = 'unasked';
    this.#sent = '';
    this.#openedAt = this.#environment.now();
    if (!this.#failures) this.#setState({ kind: 'connecting' });
    const socket = this.#environment.socket();
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
    this.#silence.start((3 * period + 5) * 1000, () => {
      if (!socket) return;
      socket.close();
      this.#onClose(socket);
    });
  }

  #request(): void {
    const want = this.#want();
    if (this.#socket?.readyState !== 1 || !want) return;
    const message = { type: 'want', period: want.period, processes: want.processes };
    const text = JSON.stringify(message);
    const past = want.history && this.#past === 'unasked';
    if (text === this.#sent && !past) return;
    this.#sent = text;
    if (past) this.#past = 'requested';
    this.#socket.send(past ? JSON.stringify({ ...message, since: this.#known }) : text);
    this.#expect();
  }

  #onMessage(data: string): void {
    this.#expect();
    if (this.#environment.now() - this.#openedAt >= STABLE_MS) this.#failures = 0;
    this.#setState({ kind: 'live' });
    const message: Message = JSON.parse(data);
    if (message.type === 'snapshot') {
      // Before the history arrives there is a gap, which may have to be requested again.
      if (this.#past === 'arrived') this.#known = message.snapshot.time;
      this.show(message.snapshot);
      return;
    }
    if (message.type === 'history') {
      this.#past = 'arrived';
      this.#known = message.history.time.at(-1) ?? this.#known;
      this.#each((listener) => listener.history?.(message.history));
    }
    this.#each((listener) => listener.cells?.(message.cells));
  }

  #onClose(socket: Socket): void {
    if (this.#socket !== socket) return;
    this.#socket = null;
    this.#silence.end();
    this.#failures++;
    if (this.#state.kind === 'live') this.#setState({ kind: 'connecting' });
    void this.#probe();
  }

  /** Find out whether the socket or the server fails, and try again. */
  async #probe(): Promise<void> {
    this.#probing = true;
    let status = 0;
    const snapshot = await this.#environment.get<Snapshot>('snapshot').catch((error: unknown) => {
      status = (error as { status?: number } | null)?.status ?? 0;
      return null;
    });
    // Nobody wants anything any more, or another request has answered.
    if (!this.#probing) return;
    this.#probing = false;
    if (snapshot) this.show(snapshot);
    const cut = this.#trans.__('A proxy cuts the connection; trying again.');
    if (!snapshot) this.#setState({ kind: 'lost', text: reason(status, this.#trans) });
    else this.#setState({ kind: 'connecting', ...(this.#failures > 1 ? { text: cut } : {}) });
    // The wait doubles after each failure; the random part spreads the pages of many users.
    const wait = Math.min(LAST_RETRY_MS, FIRST_RETRY_MS * 2 ** (this.#failures - 1));
    this.#retry.start(wait * (0.5 + this.#environment.random() / 2), () => this.#open());
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

/**
 * One connection to the server for all that show the machine on this page.
 *
 * A websocket; where a proxy cuts it, requests; nothing at all while nobody looks. Comes back by
 * itself, and then asks for what it missed.
 */

import type { Snapshot } from '../snapshot.js';
import {
  Audience,
  type Connection,
  type Listener,
  type Message,
  parse,
  type Subscription,
  type Want,
} from './audience.js';
import { Poll, Timers } from './poll.js';

/** What of a WebSocket is used. */
export type Socket = Pick<
  WebSocket,
  'readyState' | 'send' | 'close' | 'onopen' | 'onmessage' | 'onclose'
>;

/** The world outside, so that tests can be it. */
export interface World {
  socket(): Socket;
  get(path: string): Promise<unknown>;
  hidden(): boolean;
  /** Calls back whenever the page was hidden or shown, or the network came back. */
  watch(changed: () => void): () => void;
  after(milliseconds: number, then: () => void): () => void;
  /** Milliseconds. */
  now(): number;
  /** 0 to 1. */
  random(): number;
}

/** A page that is hidden for so long is left alone. */
const LEFT_MS = 10_000;
/** A socket that lived this long was not cut by a proxy. */
const STABLE_MS = 10_000;
/** So many sockets in a row that did not last: ask instead. */
const ENOUGH = 3;
const SOCKET_AGAIN_MS = 60_000;
const FIRST_RETRY_MS = 1000;
const LAST_RETRY_MS = 30_000;

const NO_SERVER = 'No connection to the Jupyter server; trying again.';
const WHY: Record<number, string> = {
  401: 'The server refuses: log in again.',
  403: 'The server refuses: log in again.',
  404: 'The Jupyter server has no gpumagic: pip install gpumagic where it runs, then restart it.',
};

export class Stream {
  #world: World;
  #say: (text: string) => string;
  #audience = new Audience(() => this.#settle());
  #timers: Timers;
  #poll: Poll;
  #unwatch: () => void;
  #state: Connection = { kind: 'standby' };
  #latest: Snapshot | null = null;
  #left = false;
  #socket: Socket | null = null;
  #openedAt = 0;
  #heard = false;
  #failures = 0;
  #probing = false;
  /** The want that the socket's other end knows. */
  #sent = '';
  /** The past is known up to here; null: not at all. */
  #known: number | null = null;
  /** This connection was asked for the past, and has told it. */
  #asked = false;
  #told = false;

  constructor(world: World, say: (text: string) => string = (text) => text) {
    this.#world = world;
    this.#say = say;
    this.#timers = new Timers((milliseconds, then) => world.after(milliseconds, then));
    this.#poll = new Poll(
      {
        get: (path) => world.get(path),
        want: () => this.#want(),
        known: () => this.#known,
        take: (message) => this.#take(message),
        failed: (error) => this.#lose(error),
      },
      this.#timers,
    );
    this.#unwatch = world.watch(() => this.#look());
    this.#look();
  }

  get latest(): Snapshot | null {
    return this.#latest;
  }

  /** Tells the listener what is known already. */
  subscribe(listener: Listener, want: Want | null): Subscription {
    const latest = this.#latest;
    if (latest) listener.snapshot?.(latest);
    const before = this.#state;
    const subscription = this.#audience.add(listener, want);
    if (this.#state === before) listener.connection?.(before);
    return subscription;
  }

  /** Shows all listeners a snapshot that came on another way. */
  show(snapshot: Snapshot): void {
    this.#latest = snapshot;
    this.#audience.tell((listener) => listener.snapshot?.(snapshot));
  }

  dispose(): void {
    this.#unwatch();
    this.#timers.end('left');
    this.#audience.clear();
  }

  /** The page was hidden or shown, or the network came back. */
  #look(): void {
    this.#timers.end('left');
    if (this.#world.hidden()) {
      this.#timers.start('left', LEFT_MS, () => {
        this.#left = true;
        this.#settle();
      });
      return;
    }
    this.#left = false;
    if (!this.#poll.runs) this.#timers.end('retry');
    this.#settle();
  }

  #want(): Want | null {
    return this.#left ? null : this.#audience.want();
  }

  /** Makes the connection be as the listeners want it. */
  #settle(): void {
    if (!this.#want()) this.#rest();
    else if (this.#socket) this.#ask();
    else if (!this.#timers.runs('retry') && !this.#probing) this.#open();
  }

  #rest(): void {
    this.#timers.end('retry', 'silence');
    this.#poll.stop();
    this.#probing = false;
    this.#failures = 0;
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
    this.#become({ kind: 'standby' });
  }

  #open(): void {
    this.#heard = this.#asked = this.#told = false;
    this.#sent = '';
    this.#openedAt = this.#world.now();
    if (!this.#failures) this.#become({ kind: 'connecting' });
    const socket = this.#world.socket();
    this.#socket = socket;
    socket.onopen = () => this.#socket === socket && this.#ask();
    socket.onmessage = (event) => this.#socket === socket && this.#hear(event.data);
    socket.onclose = () => this.#cut(socket);
    this.#listen();
  }

  /** A socket that says nothing for long is dead, whatever it thinks of itself. */
  #listen(): void {
    const socket = this.#socket;
    const period = this.#want()?.period ?? 1;
    this.#timers.start('silence', (3 * period + 5) * 1000, () => {
      if (!socket) return;
      socket.close();
      this.#cut(socket);
    });
  }

  #ask(): void {
    const want = this.#want();
    if (this.#socket?.readyState !== 1 || !want) return;
    const past = want.history && !this.#asked;
    const message = { type: 'want', period: want.period, processes: want.processes };
    const text = JSON.stringify(message);
    if (text === this.#sent && !past) return;
    this.#sent = text;
    if (past) this.#asked = true;
    this.#socket.send(past ? JSON.stringify({ ...message, since: this.#known }) : text);
    this.#listen();
  }

  #hear(data: unknown): void {
    const message = parse(data);
    if (!message) return;
    this.#listen();
    if (!this.#heard) {
      this.#heard = true;
      this.#probing = false;
      this.#poll.stop();
      this.#timers.end('retry');
      this.#become({ kind: 'live' });
    }
    this.#take(message);
  }

  #take(message: Message): void {
    if (message.type === 'snapshot') {
      // Only once the gap before it is filled: the connection may end earlier.
      if (this.#told && !this.#poll.runs) this.#known = message.snapshot.time;
      this.show(message.snapshot);
      return;
    }
    if (message.type === 'history') {
      this.#told = true;
      this.#known = message.history.time.at(-1) ?? this.#known;
      this.#audience.tell((listener) => listener.history?.(message.history));
    }
    this.#audience.tell((listener) => listener.cells?.(message.cells));
  }

  #cut(socket: Socket): void {
    if (this.#socket !== socket) return;
    this.#socket = null;
    this.#timers.end('silence');
    const lasted = this.#heard && this.#world.now() - this.#openedAt >= STABLE_MS;
    this.#failures = lasted ? 0 : this.#failures + 1;
    if (this.#poll.runs) this.#again(SOCKET_AGAIN_MS);
    else if (this.#failures > 1) void this.#probe();
    else this.#reconnect();
  }

  #reconnect(): void {
    this.#become({ kind: 'connecting' });
    this.#again();
  }

  #again(wait = this.#backoff()): void {
    this.#timers.start('retry', wait, () => this.#open());
  }

  /** Doubles, and is spread, so that not all pages come back in the same moment. */
  #backoff(): number {
    const wait = Math.min(LAST_RETRY_MS, FIRST_RETRY_MS * 2 ** Math.max(0, this.#failures - 1));
    return wait * (0.5 + this.#world.random() / 2);
  }

  /** Is it the socket, or the server? */
  async #probe(): Promise<void> {
    this.#probing = true;
    try {
      const snapshot = await this.#poll.once();
      if (snapshot === undefined) return;
      this.#probing = false;
      if (!snapshot || this.#failures < ENOUGH) {
        this.#reconnect();
        return;
      }
      this.#again(SOCKET_AGAIN_MS);
      const text = this.#say('A proxy cuts the connection; asking every few seconds instead.');
      this.#become({ kind: 'polling', text });
      this.#poll.start();
    } catch (error) {
      this.#probing = false;
      this.#lose(error);
    }
  }

  #lose(error: unknown): void {
    const status = (error as { status?: number } | null)?.status ?? 0;
    this.#become({ kind: 'lost', text: this.#say(WHY[status] ?? NO_SERVER) });
    if (!this.#socket) this.#again();
  }

  #become(state: Connection): void {
    if (state.kind === this.#state.kind && state.text === this.#state.text) return;
    this.#state = state;
    this.#audience.tell((listener) => listener.connection?.(state));
  }
}

/** Request a snapshot every few seconds where sockets do not work. */

import type { HistoryMessage, Message, Snapshot, Want } from '../snapshot.js';

const PERIOD_S = 2;
/** Every so many requests, the cells that ran are requested too. */
const PAST_EVERY = 5;

/** Timers by name; a new one replaces the old one of the same name. */
export class Timers {
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

export interface PollOptions {
  get<T>(path: string): Promise<T>;
  want(): Want | null;
  /** The time up to which the past is known; null if it is unknown. */
  known(): number | null;
  take(message: Message): void;
  failed(error: unknown): void;
}

export class Poll {
  #options: PollOptions;
  #timers: Timers;
  /** Grows when a pending answer is no longer wanted. */
  #turn = 0;
  #runs = false;

  constructor(options: PollOptions, timers: Timers) {
    this.#options = options;
    this.#timers = timers;
  }

  get runs(): boolean {
    return this.#runs;
  }

  /** Return an answer; undefined if it is no longer wanted when it arrives. */
  async #get<T>(path: string): Promise<T | undefined> {
    const turn = ++this.#turn;
    try {
      const answer = await this.#options.get<T>(path);
      return turn === this.#turn ? answer : undefined;
    } catch (error) {
      if (turn === this.#turn) throw error;
      return undefined;
    }
  }

  /** Return one snapshot; undefined if it is no longer wanted when it arrives. */
  once(): Promise<Snapshot | undefined> {
    return this.#get('snapshot');
  }

  start(): void {
    this.#runs = true;
    void this.#request(0);
  }

  stop(): void {
    this.#runs = false;
    this.#turn++;
    this.#timers.end('poll');
  }

  async #request(count: number): Promise<void> {
    const { want, known, take, failed } = this.#options;
    const wanted = want();
    if (!wanted) return;
    try {
      if (wanted.history && count % PAST_EVERY === 0) {
        const since = known();
        const past = await this.#get<HistoryMessage>(
          since === null ? 'history' : `history?since=${since}`,
        );
        if (!past) return;
        take(past);
      }
      const snapshot = await this.once();
      if (!snapshot) return;
      take({ type: 'snapshot', snapshot });
    } catch (error) {
      this.stop();
      failed(error);
      return;
    }
    const wait = Math.max(PERIOD_S, wanted.period) * 1000;
    this.#timers.start('poll', wait, () => void this.#request(count + 1));
  }
}

/** Request a snapshot every few seconds where a socket does not work. */

import type { Snapshot } from '../snapshot.js';
import { type Message, toPast, toSnapshot, type Want } from './audience.js';

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

const PERIOD_S = 2;
/** Of so many requests for a snapshot, one asks for the cells that ran too. */
const PAST_EVERY = 5;

export interface Asking {
  get(path: string): Promise<unknown>;
  want(): Want | null;
  /** The past is known up to here; null: not at all. */
  known(): number | null;
  take(message: Message): void;
  failed(error: unknown): void;
}

export class Poll {
  #asking: Asking;
  #timers: Timers;
  /** Grows whenever an answer under way is no longer wanted. */
  #turn = 0;
  #runs = false;

  constructor(asking: Asking, timers: Timers) {
    this.#asking = asking;
    this.#timers = timers;
  }

  get runs(): boolean {
    return this.#runs;
  }

  /** A single snapshot; undefined where it was no longer wanted when it came. */
  async once(): Promise<Snapshot | null | undefined> {
    const turn = ++this.#turn;
    try {
      const snapshot = toSnapshot(await this.#asking.get('snapshot'));
      return turn === this.#turn ? snapshot : undefined;
    } catch (error) {
      if (turn === this.#turn) throw error;
      return undefined;
    }
  }

  start(): void {
    this.#runs = true;
    void this.#ask(0);
  }

  stop(): void {
    this.#runs = false;
    this.#turn++;
    this.#timers.end('poll');
  }

  async #ask(count: number): Promise<void> {
    const want = this.#asking.want();
    if (!want) return;
    try {
      if (want.history && count % PAST_EVERY === 0 && !(await this.#past())) return;
      const snapshot = await this.once();
      if (snapshot === undefined) return;
      if (snapshot) this.#asking.take({ type: 'snapshot', snapshot });
    } catch (error) {
      this.stop();
      this.#asking.failed(error);
      return;
    }
    const wait = Math.max(PERIOD_S, want.period) * 1000;
    this.#timers.start('poll', wait, () => void this.#ask(count + 1));
  }

  /** False where it was no longer wanted when it came. */
  async #past(): Promise<boolean> {
    const turn = ++this.#turn;
    const known = this.#asking.known();
    const answer = await this.#asking.get(known === null ? 'history' : `history?since=${known}`);
    if (turn !== this.#turn) return false;
    const past = toPast(answer);
    if (past) this.#asking.take(past);
    return true;
  }
}

/** Who listens on this page, and what they want together. */

import type { CellRun, History, Snapshot } from '../snapshot.js';

export interface Connection {
  kind: 'live' | 'connecting' | 'polling' | 'standby' | 'lost';
  text?: string;
}

export interface Listener {
  snapshot?(snapshot: Snapshot): void;
  history?(history: History): void;
  cells?(cells: CellRun[]): void;
  connection?(connection: Connection): void;
}

export interface Want {
  /** Seconds between snapshots. */
  period: number;
  /** Who holds memory too: the most expensive question. */
  processes?: boolean;
  /** The past, and the cells that ran. */
  history?: boolean;
}

export interface Subscription {
  change(want: Want | null): void;
  close(): void;
}

/** Listeners and their wants; one without a want hears what others make come. */
export class Audience {
  #wants = new Map<Listener, Want | null>();
  #changed: () => void;

  constructor(changed: () => void) {
    this.#changed = changed;
  }

  add(listener: Listener, want: Want | null): Subscription {
    this.#wants.set(listener, want);
    this.#changed();
    return {
      change: (next) => {
        if (!this.#wants.has(listener)) return;
        this.#wants.set(listener, next);
        this.#changed();
      },
      close: () => {
        if (this.#wants.delete(listener)) this.#changed();
      },
    };
  }

  clear(): void {
    this.#wants.clear();
    this.#changed();
  }

  /** The fastest period, and all that any of them wants; null where nobody wants anything. */
  want(): Want | null {
    const wants = [...this.#wants.values()].filter((want) => want !== null);
    if (wants.length === 0) return null;
    return {
      period: Math.min(...wants.map((want) => want.period)),
      processes: wants.some((want) => want.processes),
      history: wants.some((want) => want.history),
    };
  }

  tell(what: (listener: Listener) => void): void {
    for (const listener of [...this.#wants.keys()]) what(listener);
  }
}

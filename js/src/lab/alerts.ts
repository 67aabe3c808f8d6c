/**
 * When an alert is told: once per event, and again only after it has been over for a while.
 *
 * All pages of a browser share a memory of it. Two that see the same at the same time both write
 * there; the one whose word is left there tells it.
 */

import type { Translate } from '../monitor/shared.js';
import type { Snapshot } from '../snapshot.js';
import { type Alert, driver, findings, type Limits } from './findings.js';

/** Times are seconds of the snapshots' clock; null: not so. */
interface Event {
  since: number | null;
  told: number | null;
  over: number | null;
  /** The page that tells it. */
  by: string;
}

type Memory = Pick<Storage, 'getItem' | 'setItem'>;

/** What has been over for so long may be told again. */
const REARM_S = 60;
/** A look after so long a pause cannot say what was in between. */
const PAUSE_S = 150;
/** What was told so long ago may be told again. */
const FORGET_S = 86_400;
const STORED = 'gpumagic:alerts';

export class Alerts {
  /** May be changed at any time. */
  limits: Limits;
  #t: Translate;
  #memory: Memory | null;
  #page: string;
  #events = new Map<string, Event>();
  #last = 0;
  /** There were GPUs with a driver. */
  #driven = false;
  /** What does not hold any more, as of the last update. */
  ended: string[] = [];

  /** `memory` is what this page, loaded again, and the others beside it know; `page` its own name. */
  constructor(
    limits: Limits,
    t: Translate,
    memory: Memory | null = null,
    page = `${Math.random()}`,
  ) {
    this.limits = limits;
    this.#t = t;
    this.#memory = memory;
    this.#page = page;
  }

  /** The alerts that are due now. */
  update(snapshot: Snapshot): Alert[] {
    const { time } = snapshot;
    // A clock may be set back.
    const pause = time - this.#last > PAUSE_S || time < this.#last;
    this.#last = time;
    const due: Alert[] = [];
    this.#recall();
    const before = this.#told();
    this.#driven ||= snapshot.driver !== null;
    const found = findings(snapshot, this.limits, this.#t);
    if (this.#driven && this.limits.fault) found.push(driver(snapshot, this.#t));
    this.ended = found.filter(({ holds, over }) => over && !holds).map(({ key }) => key);
    for (const { hold, holds, over, ...alert } of found) {
      const known = this.#events.get(alert.key);
      const event = known ?? { since: null, told: null, over: null, by: '' };
      if (holds) {
        if (event.since === null || pause) event.since = time;
        event.over = null;
        if (event.told === null && time - event.since >= hold) {
          event.told = time;
          event.by = this.#page;
          due.push(alert);
        }
        this.#events.set(alert.key, event);
      } else if (known && over) {
        event.since = null;
        event.over ??= time;
      }
    }
    for (const [key, { told, over }] of this.#events) {
      const rearmed = over !== null && (told === null || time - over >= REARM_S);
      if (rearmed || (told !== null && time - told > FORGET_S)) this.#events.delete(key);
    }
    const after = this.#told();
    if (after !== before) this.#memory?.setItem(STORED, after);
    return due;
  }

  /** Whether it is for this page to tell it, some time after it was due. */
  isMine({ key }: Alert): boolean {
    this.#recall();
    return this.#events.get(key)?.by === this.#page;
  }

  #told(): string {
    return JSON.stringify([...this.#events].filter(([, event]) => event.told !== null));
  }

  /** What is in the memory goes before what this page thinks. */
  #recall(): void {
    if (!this.#memory) return;
    const stored = read(this.#memory.getItem(STORED));
    for (const [key, event] of this.#events)
      if (event.told !== null && !stored.has(key)) this.#events.delete(key);
    for (const [key, event] of stored) {
      const since = this.#events.get(key)?.since ?? null;
      this.#events.set(key, { ...event, since });
    }
  }
}

function read(text: string | null): Map<string, Event> {
  const events = new Map<string, Event>();
  try {
    for (const [key, { told, over, by }] of JSON.parse(text ?? '[]')) {
      const event = { since: null, told: Number(told), over: over ?? null, by: String(by) };
      events.set(String(key), event);
    }
  } catch {
    // What another program wrote there is not ours to fix.
  }
  return events;
}

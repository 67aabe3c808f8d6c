/** When an alert is told: once per event, and again only after it has been over for a while. */

import type { Translate } from '../monitor/shared.js';
import type { Snapshot } from '../snapshot.js';
import { type Alert, findings, type Limits } from './findings.js';

/** Times are seconds of the snapshots' clock; null: not so. */
interface Event {
  since: number | null;
  told: number | null;
  over: number | null;
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
  #events: Map<string, Event>;
  #last = 0;

  /** `memory` lets a page that was loaded again know what it has told. */
  constructor(limits: Limits, t: Translate, memory: Memory | null = null) {
    this.limits = limits;
    this.#t = t;
    this.#memory = memory;
    this.#events = recall(memory);
  }

  /** The alerts that are due now. */
  update(snapshot: Snapshot): Alert[] {
    const { time } = snapshot;
    // A clock may be set back.
    const pause = time - this.#last > PAUSE_S || time < this.#last;
    this.#last = time;
    const due: Alert[] = [];
    const before = this.#told();
    for (const { hold, holds, over, ...alert } of findings(snapshot, this.limits, this.#t)) {
      const known = this.#events.get(alert.key);
      const event = known ?? { since: null, told: null, over: null };
      if (holds) {
        if (event.since === null || pause) event.since = time;
        event.over = null;
        if (event.told === null && time - event.since >= hold) {
          event.told = time;
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

  #told(): string {
    return JSON.stringify([...this.#events].filter(([, event]) => event.told !== null));
  }
}

function recall(memory: Memory | null): Map<string, Event> {
  const events = new Map<string, Event>();
  try {
    for (const [key, event] of JSON.parse(memory?.getItem(STORED) ?? '[]'))
      events.set(String(key), { since: null, told: Number(event.told), over: event.over ?? null });
  } catch {
    // What another program wrote there is not ours to mend.
  }
  return events;
}

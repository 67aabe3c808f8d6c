/** Watches for what should be told without having been asked, also while the panel is closed. */

import type { Snapshot } from '../snapshot.js';
import type { Alerts } from './alerts.js';
import type { Subscription } from './audience.js';
import type { Alert, Limits } from './findings.js';
import { toSnapshot } from './messages.js';
import type { Stream, World } from './stream.js';

/** Seconds between looks, where nobody wants more. */
const PERIOD_S = 5;
/** Who holds memory is asked this rarely while nobody looks. */
const HOLDERS_MS = 60_000;
/** Until another page that saw the same has said so. */
const SETTLE_MS = 300;

export class Watch {
  #alerts: Alerts;
  #stream: Stream;
  #world: Pick<World, 'get' | 'hidden' | 'after'>;
  #subscription: Subscription;
  #latest: Snapshot | null = null;

  constructor(
    alerts: Alerts,
    stream: Stream,
    world: Pick<World, 'get' | 'hidden' | 'after'>,
    tell: (alert: Alert) => void,
    over: (key: string) => void = () => {},
  ) {
    this.#alerts = alerts;
    this.#stream = stream;
    this.#world = world;
    const snapshot = (latest: Snapshot) => {
      this.#latest = latest;
      for (const alert of alerts.update(latest))
        world.after(SETTLE_MS, () => alerts.isMine(alert) && tell(alert));
      for (const key of alerts.ended) over(key);
    };
    this.#subscription = stream.subscribe({ snapshot }, null);
    this.#again();
  }

  limits(limits: Limits): void {
    this.#alerts.limits = limits;
    const any = limits.memory || limits.heat || limits.idle || limits.fault;
    this.#subscription.change(any ? { period: PERIOD_S } : null);
  }

  /** Who holds memory, unless that is known, or nobody can. */
  async holders(): Promise<void> {
    const latest = this.#latest;
    if (this.#world.hidden() || !latest?.gpus.length || latest.processes.length) return;
    const snapshot = await this.#world.get('snapshot').then(toSnapshot, () => null);
    if (snapshot?.processes.length) this.#stream.show(snapshot);
  }

  #again(): void {
    this.#world.after(HOLDERS_MS, () => {
      void this.holders();
      this.#again();
    });
  }
}

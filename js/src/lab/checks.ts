/** When the doctor is asked: where there is no GPU, and when a person wants it. */

import type { Monitor } from '../monitor/monitor.js';
import type { Snapshot } from '../snapshot.js';
import { toChecks, toSnapshot } from './messages.js';
import type { Api } from './request.js';

export class Doctor {
  #api: Pick<Api, 'get'>;
  #monitor: Pick<Monitor, 'diagnose'>;
  #found: (snapshot: Snapshot) => void;
  /** What was wrong when the doctor was last asked without being called; null: not so asked. */
  #asked: string | null = null;
  #called = false;

  constructor(
    api: Pick<Api, 'get'>,
    monitor: Pick<Monitor, 'diagnose'>,
    found: (snapshot: Snapshot) => void,
  ) {
    this.#api = api;
    this.#monitor = monitor;
    this.#found = found;
  }

  /** Asks again whenever something else is wrong. */
  snapshot(snapshot: Snapshot): void {
    if (snapshot.gpus.length > 0) {
      if (this.#asked !== null) this.#monitor.diagnose(null);
      this.#asked = null;
      return;
    }
    const wrong = snapshot.problems.map((problem) => problem.code).join();
    if (wrong === this.#asked) return;
    this.#asked = wrong;
    void this.ask();
  }

  /** A person calls; called again where it `isSeen`, it goes. */
  async call(isSeen: boolean): Promise<void> {
    this.#called = !(this.#called && isSeen && this.#asked === null);
    if (this.#called) await this.ask();
    else this.#monitor.diagnose(null);
  }

  async ask(): Promise<void> {
    try {
      const checks = toChecks(await this.#api.get('doctor'));
      if (checks.length) this.#monitor.diagnose(checks);
    } catch {
      // The connection's own line says what is wrong; the next look asks again.
      this.#asked = null;
    }
  }

  /** The machine and the doctor once more, without waiting for the next look. */
  async again(): Promise<void> {
    const snapshot = await this.#api.get('snapshot').then(toSnapshot, () => null);
    if (snapshot) this.#found(snapshot);
    await this.ask();
  }
}

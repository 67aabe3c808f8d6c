/** Alert the user once per event: memory nearly full, heat, faults, idle notebooks. */

import { fullLabel, hot } from '../monitor/names.js';
import { groups } from '../monitor/owners.js';
import type { Translate } from '../monitor/shared.js';
import { fastest, isFull, size } from '../monitor/units.js';
import type { GpuSample, KernelSample, Place, ProcessSample, Snapshot } from '../snapshot.js';
import type { Change, Environment, Stream } from './stream.js';

export interface Limits {
  memoryAlert: boolean;
  memoryPercent: number;
  memorySeconds: number;
  heatAlert: boolean;
  heatSeconds: number;
  idleAlert: boolean;
  idleMinutes: number;
  idleGiB: number;
  faultAlert: boolean;
  ramInterrupt: boolean;
}

export interface Alert {
  /** Unique to the event. */
  key: string;
  kind: 'memory' | 'heat' | 'idle' | 'fault';
  text: string;
  /** The GPU; null for the driver and for an idle notebook. */
  uuid: string | null;
  /** The kernel of an idle notebook. */
  process?: ProcessSample;
  /** The cell that ran when a kernel died. */
  place?: Place;
}

/** Something that holds, or is over. */
interface Condition extends Alert {
  /** Seconds for which it must hold before the alert. */
  hold: number;
  holds: boolean;
}

/** An older Xid is no news. */
const NEWS_S = 600;
/** A driver update may take this long. */
const UPDATE_S = 5;
/** The power cap is missing here: a busy GPU runs at it all day. */
const THROTTLED = /thermal|hardware slowdown|power brake/;
/** An event that has been over for this long may be alerted again. */
const REARM_S = 60;
/** After a longer gap between snapshots, conditions start again. */
const GAP_S = 150;
/** Seconds between snapshots if nobody wants more. */
const PERIOD_S = 5;
/** The same if cells are interrupted, and the share of RAM at which they are. */
const SOON_S = 0.5;
const FILLED = 0.97;
/** How often processes are requested if nobody wants them. */
const PROCESSES_MS = 60_000;
/** The time of the last death about which this browser has alerted. */
const ALERTED = 'gpumagic:alerted';

function conditions(snapshot: Snapshot, limits: Limits, trans: Translate): Condition[] {
  const found: Condition[] = [];
  for (const gpu of snapshot.gpus) {
    if (limits.faultAlert) found.push(lost(gpu, snapshot, trans), ...xid(gpu, snapshot, trans));
    if (gpu.lost) continue;
    if (limits.memoryAlert) found.push(...memory(gpu, limits, trans));
    if (limits.heatAlert) found.push(...heat(gpu, limits, trans));
  }
  return limits.idleAlert ? [...found, ...idle(snapshot, limits, trans)] : found;
}

function memory(gpu: GpuSample, limits: Limits, trans: Translate): Condition[] {
  const { memory_total: total, memory_used: used, uuid } = gpu;
  if (!total || used === null) return [];
  const reserved = gpu.unified ? 0 : (gpu.memory_reserved ?? 0);
  const holds = 100 * (used + reserved) >= limits.memoryPercent * total;
  const values = [fullLabel(gpu), size(used), size(total)] as const;
  const text = trans.__('%1: memory is nearly full, %2 of %3.', ...values);
  return [{ key: `memory ${uuid}`, kind: 'memory', uuid, text, hold: limits.memorySeconds, holds }];
}

function heat(gpu: GpuSample, limits: Limits, trans: Translate): Condition[] {
  const { temperature, throttle, uuid } = gpu;
  if (temperature === null && throttle === null) return [];
  const reasons = throttle?.filter((reason) => THROTTLED.test(reason)) ?? [];
  const parts = temperature === null ? reasons : [`${temperature.toFixed(0)} °C`, ...reasons];
  const values = [fullLabel(gpu), parts.join(', ')] as const;
  const text = reasons.length
    ? trans.__('%1 is throttled: %2.', ...values)
    : trans.__('%1 is at its temperature limit: %2.', ...values);
  const holds = hot(gpu) || reasons.length > 0;
  return [{ key: `heat ${uuid}`, kind: 'heat', uuid, text, hold: limits.heatSeconds, holds }];
}

function lost(gpu: GpuSample, { problems }: Snapshot, trans: Translate): Condition {
  const { uuid, lost: holds } = gpu;
  const problem = problems.find((one) => one.code === 'gpu-lost' && one.uuid === uuid);
  const name = fullLabel(gpu);
  // JupyterLab shows 140 characters: the cure is more useful than the cause.
  const text = problem
    ? trans.__('%1 is lost: %2.', name, problem.cure)
    : trans.__('%1 is lost.', name);
  return { key: `lost ${uuid}`, kind: 'fault', uuid, text, hold: 0, holds };
}

function xid(gpu: GpuSample, { time }: Snapshot, trans: Translate): Condition[] {
  const { uuid, xid, xid_time: when } = gpu;
  if (xid === null || time - (when ?? 0) > NEWS_S) return [];
  const text = trans.__('%1 had a critical error, Xid %2: see dmesg.', fullLabel(gpu), xid);
  return [{ key: `xid ${uuid} ${when}`, kind: 'fault', uuid, text, hold: 0, holds: true }];
}

/** The driver is gone, on a machine that had one: an update, or an unloaded module. */
function noDriver({ driver, problems }: Snapshot, trans: Translate): Condition {
  const why = problems.find((problem) => problem.uuid === null);
  const text = why
    ? trans.__('The driver is gone: %1.', why.cause)
    : trans.__('The driver is gone.');
  return { key: 'driver', kind: 'fault', uuid: null, text, hold: UPDATE_S, holds: driver === null };
}

/** Idle kernels, each with its child processes; none if the snapshot has no processes. */
function idle({ gpus, processes, time }: Snapshot, limits: Limits, trans: Translate): Condition[] {
  const names = new Map(gpus.map((gpu) => [gpu.uuid, fullLabel(gpu)]));
  const kernels = processes.filter(({ kernel, orphan }) => kernel && !orphan);
  return groups(kernels, null).map(({ main, all, memory }) => {
    const seconds = time - (main.idle_since ?? time);
    const holds =
      main.idle_since !== null &&
      seconds >= limits.idleMinutes * 60 &&
      (memory ?? 0) >= limits.idleGiB * 2 ** 30;
    const where = new Set(all.map(({ uuid }) => names.get(uuid) ?? uuid));
    const text = trans.__(
      '%1 holds %2 on %3 and has been idle for %4 min.',
      main.notebook ?? main.name ?? `PID ${main.pid}`,
      size(memory),
      [...where].join(', '),
      Math.floor(seconds / 60),
    );
    const key = `idle ${main.kernel}`;
    return { key, kind: 'idle', uuid: null, text, process: main, hold: 0, holds };
  });
}

/** Return the deaths about which no page of this browser has alerted, also earlier ones. */
function deaths({ events }: Snapshot): Alert[] {
  const last = Number(localStorage.getItem(ALERTED));
  const news = events.filter(({ time }) => time > last);
  for (const { time } of news) localStorage.setItem(ALERTED, String(time));
  return news.map((death) => ({
    key: death.id,
    kind: 'fault',
    text: death.title,
    uuid: null,
    place: death,
  }));
}

/** Times are seconds of the snapshots' clock. */
interface Event {
  since: number | null;
  alerted: boolean;
  over: number | null;
}

export class Alerts {
  limits: Limits;
  #trans: Translate;
  #events = new Map<string, Event>();
  #last = 0;
  /** The GPUs that hold memory of my notebooks: not every snapshot has processes. */
  #mine = new Set<string>();
  /** Whether there was a driver. */
  #driven = false;
  /** The keys of the conditions that are over, as of the last update. */
  over: string[] = [];

  constructor(limits: Limits, trans: Translate) {
    this.limits = limits;
    this.#trans = trans;
  }

  /** Return the alerts that are due now: only about GPUs that my notebooks use. */
  update(snapshot: Snapshot): Alert[] {
    const { time } = snapshot;
    // A clock can be set back.
    const gap = time - this.#last > GAP_S || time < this.#last;
    this.#last = time;
    this.#driven ||= snapshot.driver !== null;
    this.#remember(snapshot);
    const found = conditions(snapshot, this.limits, this.#trans);
    if (this.#driven && this.limits.faultAlert) found.push(noDriver(snapshot, this.#trans));
    this.over = found.filter(({ holds }) => !holds).map(({ key }) => key);
    const due = found.filter((condition) => this.#isDue(condition, time, gap));
    for (const [key, { alerted, over }] of this.#events)
      if (over !== null && (!alerted || time - over >= REARM_S)) this.#events.delete(key);
    return [...(this.limits.faultAlert ? deaths(snapshot) : []), ...due];
  }

  /** Record whether a condition holds; return whether the user is to be alerted now. */
  #isDue({ key, uuid, hold, holds }: Condition, time: number, gap: boolean): boolean {
    const event = this.#events.get(key) ?? { since: null, alerted: false, over: null };
    if (!holds) {
      event.since = null;
      event.over ??= time;
      return false;
    }
    this.#events.set(key, event);
    if (event.since === null || gap) event.since = time;
    event.over = null;
    const isMine = uuid === null ? this.#mine.size > 0 : this.#mine.has(uuid);
    if (!isMine || event.alerted || time - event.since < hold) return false;
    event.alerted = true;
    return true;
  }

  #remember({ gpus, processes }: Snapshot): void {
    if (!processes.length) return;
    // A lost GPU has no processes any more.
    const lost = gpus.filter((gpu) => gpu.lost && this.#mine.has(gpu.uuid));
    const held = processes.filter(({ kernel, notebook }) => kernel ?? notebook);
    const parents = new Map(gpus.map((gpu) => [gpu.uuid, gpu.mig]));
    const uuids = [...held, ...lost].flatMap(({ uuid }) => [uuid, parents.get(uuid) ?? uuid]);
    this.#mine = new Set(uuids);
  }
}

/** Checks snapshots for alerts, also while the panel is closed. */
export class AlertPoll {
  #alerts: Alerts;
  #stream: Stream;
  #environment: Pick<Environment, 'get' | 'hidden' | 'after'>;
  #interrupt: (kernel: KernelSample) => void;
  #change: Change;
  #interrupted = false;

  /**
   * `notify` gets each alert, `dismiss` the keys of the conditions that are over, and `interrupt`
   * the kernel that fills the RAM.
   */
  constructor(
    alerts: Alerts,
    stream: Stream,
    environment: Pick<Environment, 'get' | 'hidden' | 'after'>,
    notify: (alert: Alert) => void,
    dismiss: (key: string) => void,
    interrupt: (kernel: KernelSample) => void,
  ) {
    [this.#alerts, this.#stream, this.#environment] = [alerts, stream, environment];
    this.#interrupt = interrupt;
    const snapshot = (latest: Snapshot) => {
      alerts.update(latest).forEach(notify);
      alerts.over.forEach(dismiss);
      this.#stopFilling(latest);
    };
    this.#change = stream.subscribe({ snapshot }, null);
    this.#again();
  }

  setLimits(limits: Limits): void {
    this.#alerts.limits = limits;
    const { ramInterrupt, ...rest } = limits;
    const period = ramInterrupt ? SOON_S : PERIOD_S;
    const any = ramInterrupt || Object.values(rest).includes(true);
    this.#change(any ? { period } : null);
  }

  /** Request the processes unless they are known, or the page is hidden. */
  async processes(): Promise<void> {
    const { latest } = this.#stream;
    if (this.#environment.hidden() || !latest?.gpus.length || latest.processes.length) return;
    const snapshot = await this.#environment.get<Snapshot>('snapshot').catch(() => null);
    if (snapshot?.processes.length) this.#stream.show(snapshot);
  }

  /** Interrupt the busy kernel that grows fastest, once until there is room again. */
  #stopFilling({ host, kernels }: Snapshot): void {
    if (!isFull(host)) this.#interrupted = false;
    if (!this.#alerts.limits.ramInterrupt || this.#interrupted || !isFull(host, FILLED)) return;
    const most = fastest(kernels.filter(({ idle_since }) => idle_since === null));
    if (!most) return;
    this.#interrupted = true;
    this.#interrupt(most);
  }

  #again(): void {
    this.#environment.after(PROCESSES_MS, () => {
      void this.processes();
      this.#again();
    });
  }
}

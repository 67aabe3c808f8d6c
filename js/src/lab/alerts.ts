/** Alert the user once per event: memory nearly full, heat, faults, idle notebooks. */

import { fullLabel, hot } from '../monitor/names.js';
import type { Translate } from '../monitor/shared.js';
import { isFull, size } from '../monitor/units.js';
import type { GpuSample, KernelSample, Place, ProcessSample, Snapshot } from '../snapshot.js';
import type { Stream, Subscription, World } from './stream.js';

export interface Limits {
  memoryAlert: boolean;
  memoryPercent: number;
  memorySeconds: number;
  heatAlert: boolean;
  heatSeconds: number;
  idleAlert: boolean;
  idleMinutes: number;
  idleBytes: number;
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

/** A condition that holds or is over; if neither, it keeps its state. */
interface Finding extends Alert {
  /** Seconds for which it must hold before the alert. */
  hold: number;
  holds: boolean;
  over: boolean;
}

/** Full memory is over this far below the limit, in percent. */
const MARGIN = 5;
/** An older Xid is no news. */
const NEWS_S = 600;
/** A driver update may take this long. */
const BLINK_S = 5;
/** The power cap is missing here: a busy GPU runs at it all day. */
const THROTTLED = /thermal|hardware slowdown|power brake/;
/** An event that has been over for this long may be alerted again. */
const REARM_S = 60;
/** After a longer gap between snapshots, conditions start again. */
const GAP_S = 150;
/** Seconds between snapshots if nobody wants more. */
const PERIOD_S = 5;
/** The same while a cell may have to be interrupted, and the share of the RAM at which it is. */
const SOON_S = 0.5;
const FILLED = 0.97;
/** The time of the last death that this browser's user was told. */
const TOLD = 'gpumagic:told';
/** How often processes are requested if nobody wants them. */
const PROCESSES_MS = 60_000;

function findings(snapshot: Snapshot, limits: Limits, trans: Translate): Finding[] {
  const found: Finding[] = [];
  for (const gpu of snapshot.gpus) {
    if (limits.faultAlert) found.push(...faults(gpu, snapshot, trans));
    if (gpu.lost) continue;
    if (limits.memoryAlert) found.push(...memory(gpu, limits, trans));
    if (limits.heatAlert) found.push(...heat(gpu, limits, trans));
  }
  return limits.idleAlert ? [...found, ...idle(snapshot, limits, trans)] : found;
}

function memory(gpu: GpuSample, limits: Limits, trans: Translate): Finding[] {
  const { memory_total: total, memory_used: used, uuid } = gpu;
  if (!total || used === null) return [];
  const reserved = gpu.unified ? 0 : (gpu.memory_reserved ?? 0);
  const percent = (100 * (used + reserved)) / total;
  const text = trans.__(
    '%1: memory is nearly full, %2 of %3.',
    fullLabel(gpu),
    size(used),
    size(total),
  );
  const holds = percent >= limits.memoryPercent;
  const over = percent < limits.memoryPercent - MARGIN;
  const key = `memory ${uuid}`;
  return [{ key, kind: 'memory', uuid, text, hold: limits.memorySeconds, holds, over }];
}

function heat(gpu: GpuSample, limits: Limits, trans: Translate): Finding[] {
  const { temperature, throttle, uuid } = gpu;
  if (temperature === null && throttle === null) return [];
  const reasons = throttle?.filter((reason) => THROTTLED.test(reason)) ?? [];
  const parts = temperature === null ? reasons : [`${temperature.toFixed(0)} °C`, ...reasons];
  const told = [fullLabel(gpu), parts.join(', ')] as const;
  const text = reasons.length
    ? trans.__('%1 is throttled: %2.', ...told)
    : trans.__('%1 is at its temperature limit: %2.', ...told);
  const holds = hot(gpu) || reasons.length > 0;
  return [
    {
      key: `heat ${uuid}`,
      kind: 'heat',
      uuid,
      text,
      hold: limits.heatSeconds,
      holds,
      over: !holds,
    },
  ];
}

function faults(gpu: GpuSample, snapshot: Snapshot, trans: Translate): Finding[] {
  const problem = snapshot.problems.find((one) => one.code === 'gpu-lost' && one.uuid === gpu.uuid);
  const name = fullLabel(gpu);
  // JupyterLab shows 140 characters: the cure is more useful than the cause.
  const text = problem
    ? trans.__('%1 is lost: %2.', name, problem.cure)
    : trans.__('%1 is lost.', name);
  const common = { kind: 'fault' as const, uuid: gpu.uuid, hold: 0 };
  const lost = { key: `lost ${gpu.uuid}`, text, holds: gpu.lost, over: !gpu.lost, ...common };
  const { xid, xid_time: when } = gpu;
  if (xid === null || snapshot.time - (when ?? 0) > NEWS_S) return [lost];
  const critical = trans.__('%1 had a critical error, Xid %2: see dmesg.', name, xid);
  const key = `xid ${gpu.uuid} ${when}`;
  return [lost, { key, text: critical, holds: true, over: false, ...common }];
}

/** The driver is gone, on a machine that had one: an update, or an unloaded module. */
function noDriver({ driver, problems }: Snapshot, trans: Translate): Finding {
  const why = problems.find((problem) => problem.uuid === null);
  const text = why
    ? trans.__('The driver is gone: %1.', why.cause)
    : trans.__('The driver is gone.');
  const holds = driver === null;
  return { key: 'driver', kind: 'fault', uuid: null, text, hold: BLINK_S, holds, over: !holds };
}

/** Idle kernels, each with its child processes; none if the snapshot has no processes. */
function idle(snapshot: Snapshot, limits: Limits, trans: Translate): Finding[] {
  const names = new Map(snapshot.gpus.map((gpu) => [gpu.uuid, fullLabel(gpu)]));
  const kernels = new Map<string, { main: ProcessSample; bytes: number; gpus: Set<string> }>();
  for (const process of snapshot.processes) {
    if (!process.kernel || process.orphan) continue;
    const one = kernels.get(process.kernel) ?? { main: process, bytes: 0, gpus: new Set() };
    one.bytes += process.memory ?? 0;
    one.gpus.add(names.get(process.uuid) ?? process.uuid);
    if (!process.child) one.main = process;
    kernels.set(process.kernel, one);
  }
  return [...kernels].map(([kernel, { main, bytes, gpus }]) => {
    const seconds = main.idle_since === null ? -1 : snapshot.time - main.idle_since;
    const holds = seconds >= 0 && seconds >= limits.idleMinutes * 60 && bytes >= limits.idleBytes;
    const text = trans.__(
      '%1 holds %2 on %3 and has been idle for %4 min.',
      main.notebook ?? main.name ?? `PID ${main.pid}`,
      size(bytes),
      [...gpus].join(', '),
      Math.floor(seconds / 60),
    );
    const key = `idle ${kernel}`;
    return { key, kind: 'idle', uuid: null, text, process: main, hold: 0, holds, over: !holds };
  });
}

/** Return the deaths that no page of this browser has told, also those before it was opened. */
function deaths({ events }: Snapshot, before: number): Alert[] {
  const told = Math.max(before, Number(localStorage.getItem(TOLD)));
  const news = (events ?? []).filter(({ time }) => time > told);
  for (const { time } of news) localStorage.setItem(TOLD, String(time));
  return news.map((place) => ({
    key: place.id,
    kind: 'fault',
    text: place.title,
    uuid: null,
    place,
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
  /** The time of the last death. */
  #told = 0;
  /** There was a driver. */
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
    const found = findings(snapshot, this.limits, this.#trans);
    if (this.#driven && this.limits.faultAlert) found.push(noDriver(snapshot, this.#trans));
    this.over = found.filter(({ over }) => over).map(({ key }) => key);
    const due = this.limits.faultAlert ? deaths(snapshot, this.#told) : [];
    this.#told = Math.max(this.#told, ...(snapshot.events ?? []).map(({ time }) => time));
    for (const { hold, holds, over, ...alert } of found) {
      const known = this.#events.get(alert.key);
      const event = known ?? { since: null, alerted: false, over: null };
      if (holds) {
        if (event.since === null || gap) event.since = time;
        event.over = null;
        const mine = alert.uuid === null ? this.#mine.size > 0 : this.#mine.has(alert.uuid);
        if (mine && !event.alerted && time - event.since >= hold) {
          event.alerted = true;
          due.push(alert);
        }
        this.#events.set(alert.key, event);
      } else if (over) {
        event.since = null;
        event.over ??= time;
      }
    }
    for (const [key, { alerted, over }] of this.#events)
      if (over !== null && (!alerted || time - over >= REARM_S)) this.#events.delete(key);
    return due;
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
  #world: Pick<World, 'get' | 'hidden' | 'after'>;
  #subscription: Subscription;
  #interrupted = false;

  /**
   * `notify` gets each alert, `dismiss` the keys of the conditions that are over, and `interrupt`
   * the kernel that fills the RAM.
   */
  constructor(
    alerts: Alerts,
    stream: Stream,
    world: Pick<World, 'get' | 'hidden' | 'after'>,
    notify: (alert: Alert) => void,
    dismiss: (key: string) => void = () => {},
    interrupt: (kernel: KernelSample) => void = () => {},
  ) {
    [this.#alerts, this.#stream, this.#world] = [alerts, stream, world];
    const snapshot = (latest: Snapshot) => {
      alerts.update(latest).forEach(notify);
      alerts.over.forEach(dismiss);
      const { host, kernels } = latest;
      if (!isFull(host)) this.#interrupted = false;
      if (!alerts.limits.ramInterrupt || this.#interrupted || !isFull(host, FILLED)) return;
      const busy = kernels.filter(({ idle_since }) => idle_since === null);
      const [most] = busy.sort((a, b) => (b.growth ?? 0) - (a.growth ?? 0));
      if (!most || (most.growth ?? 0) <= 0) return;
      this.#interrupted = true;
      interrupt(most);
    };
    this.#subscription = stream.subscribe({ snapshot }, null);
    this.#again();
  }

  setLimits(limits: Limits): void {
    this.#alerts.limits = limits;
    const { ramInterrupt, ...rest } = limits;
    const period = ramInterrupt ? SOON_S : PERIOD_S;
    this.#subscription.change(
      Object.values(rest).includes(true) || ramInterrupt ? { period } : null,
    );
  }

  /** Request the processes unless they are known, or the page is hidden. */
  async processes(): Promise<void> {
    const { latest } = this.#stream;
    if (this.#world.hidden() || !latest?.gpus.length || latest.processes.length) return;
    const snapshot = await this.#world.get<Snapshot>('snapshot').catch(() => null);
    if (snapshot?.processes.length) this.#stream.show(snapshot);
  }

  #again(): void {
    this.#world.after(PROCESSES_MS, () => {
      void this.processes();
      this.#again();
    });
  }
}

/** Tell each event once, and again only after it has been over for a while. */

import { hot } from '../monitor/names.js';
import type { Translate } from '../monitor/shared.js';
import { size } from '../monitor/units.js';
import type { GpuSample, ProcessSample, Snapshot } from '../snapshot.js';
import { type Subscription, toSnapshot } from './audience.js';
import { label } from './status-text.js';
import type { Stream, World } from './stream.js';

export interface Limits {
  memory: boolean;
  memoryPercent: number;
  memorySeconds: number;
  heat: boolean;
  heatSeconds: number;
  idle: boolean;
  idleMinutes: number;
  idleBytes: number;
  fault: boolean;
}

export interface Alert {
  /** The same as long as it is the same event. */
  key: string;
  kind: 'memory' | 'heat' | 'idle' | 'fault';
  text: string;
  /** Whose notebook it is, of an idle one. */
  process?: ProcessSample;
}

/** Something that holds now, or is over; neither: it stays as it was. */
export interface Finding extends Alert {
  /** Seconds for which it must hold before it is told. */
  hold: number;
  holds: boolean;
  over: boolean;
}

/** Memory that was full is so until it is this much below the limit, in percent. */
const MARGIN = 5;
/** An Xid of before is no news. */
const NEWS_S = 600;
/** A driver that is away for less is not gone. */
const BLINK_S = 5;
/** Not the power cap: a busy GPU runs at it all day. */
const SLOWED = /thermal|hardware slowdown|power brake/;

export function findings(snapshot: Snapshot, limits: Limits, t: Translate): Finding[] {
  const found: Finding[] = [];
  for (const gpu of snapshot.gpus) {
    if (limits.fault) found.push(...faults(gpu, snapshot, t));
    if (gpu.lost) continue;
    if (limits.memory) found.push(...memory(gpu, limits, t));
    if (limits.heat) found.push(...heat(gpu, limits, t));
  }
  return limits.idle ? [...found, ...idle(snapshot, limits, t)] : found;
}

function memory(gpu: GpuSample, limits: Limits, t: Translate): Finding[] {
  const { memory_total: total, memory_used: used } = gpu;
  if (!total || used == null) return [];
  const reserved = gpu.unified ? 0 : (gpu.memory_reserved ?? 0);
  const percent = (100 * (used + reserved)) / total;
  return [
    {
      key: `memory ${gpu.uuid}`,
      kind: 'memory',
      text: t('%1: memory is nearly full, %2 of %3.', label(gpu), size(used), size(total)),
      hold: limits.memorySeconds,
      holds: percent >= limits.memoryPercent,
      over: percent < limits.memoryPercent - MARGIN,
    },
  ];
}

function heat(gpu: GpuSample, limits: Limits, t: Translate): Finding[] {
  const { temperature, throttle } = gpu;
  if (temperature == null && throttle == null) return [];
  const slowed = throttle?.filter((reason) => SLOWED.test(reason)) ?? [];
  const parts = temperature == null ? slowed : [`${temperature.toFixed(0)} °C`, ...slowed];
  const text = slowed.length ? '%1 is slowed down: %2.' : '%1 is at its temperature limit: %2.';
  const holds = hot(gpu) || slowed.length > 0;
  return [
    {
      key: `heat ${gpu.uuid}`,
      kind: 'heat',
      text: t(text, label(gpu), parts.join(', ')),
      hold: limits.heatSeconds,
      holds,
      over: !holds,
    },
  ];
}

function faults(gpu: GpuSample, snapshot: Snapshot, t: Translate): Finding[] {
  const problem = snapshot.problems.find((one) => one.code === 'gpu-lost' && one.uuid === gpu.uuid);
  // JupyterLab shows no more than 140 characters: the cure rather than the cause.
  const text = problem
    ? t('%1 is lost: %2.', label(gpu), problem.cure)
    : t('%1 is lost.', label(gpu));
  const common = { kind: 'fault' as const, hold: 0 };
  const lost = { key: `lost ${gpu.uuid}`, text, holds: gpu.lost, over: !gpu.lost, ...common };
  const { xid, xid_time: when } = gpu;
  if (xid == null || snapshot.time - (when ?? 0) > NEWS_S) return [lost];
  const said = t('%1 had a critical error, Xid %2: see dmesg.', label(gpu), xid);
  const key = `xid ${gpu.uuid} ${when}`;
  return [lost, { key, text: said, holds: true, over: false, ...common }];
}

/** On a machine that had GPUs: the driver has gone, by an update or a module that was unloaded. */
export function driver({ driver, problems }: Snapshot, t: Translate): Finding {
  const why = problems.find((problem) => problem.uuid === null);
  const text = why ? t('The driver has gone: %1.', why.cause) : t('The driver has gone.');
  const gone = driver === null;
  return { key: 'driver', kind: 'fault', text, hold: BLINK_S, holds: gone, over: !gone };
}

/** Of each kernel with its children; where nobody asked who holds memory there are none. */
function idle(snapshot: Snapshot, limits: Limits, t: Translate): Finding[] {
  const names = new Map(snapshot.gpus.map((gpu) => [gpu.uuid, label(gpu)]));
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
    const seconds = main.idle_since == null ? -1 : snapshot.time - main.idle_since;
    const holds = seconds >= 0 && seconds >= limits.idleMinutes * 60 && bytes >= limits.idleBytes;
    const text = t(
      '%1 holds %2 on %3 and has run nothing for %4 min.',
      main.notebook ?? main.name ?? `pid ${main.pid}`,
      size(bytes),
      [...gpus].join(', '),
      Math.floor(seconds / 60),
    );
    const key = `idle ${kernel}`;
    return { key, kind: 'idle', text, process: main, hold: 0, holds, over: !holds };
  });
}

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

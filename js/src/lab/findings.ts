/** What in a snapshot is worth an alert. Pure; the limits are the settings'. */

import type { Translate } from '../monitor/shared.js';
import { size } from '../monitor/units.js';
import { hot } from '../monitor/words.js';
import type { GpuSample, ProcessSample, Snapshot } from '../snapshot.js';
import { label } from './brief.js';

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

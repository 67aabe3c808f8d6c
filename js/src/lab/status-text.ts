/** Describe one GPU in a few words for the status bar, and all of them in a tooltip. */

import { broken, file, full, fullLabel } from '../monitor/names.js';
import type { Translate } from '../monitor/shared.js';
import { filled, NOT_KNOWN } from '../monitor/units.js';
import type { GpuSample, Problem, Snapshot } from '../snapshot.js';

const LISTED = 16;

export interface StatusText {
  text: string;
  /** One line for each GPU, then the problems. */
  details: string;
  wrong: boolean;
  /** Whether the memory of this GPU is nearly full. */
  full: boolean;
}

/** The GPU of the current notebook, and its ordinal there. */
export interface Own {
  uuid: string;
  ordinal: number | null;
  notebook: string | null;
}

function describe(gpu: GpuSample, trans: Translate, ordinal = gpu.ordinal): string {
  const name = fullLabel(gpu, ordinal);
  if (gpu.lost) return `${name} ${trans.__('lost')}`;
  const load = gpu.utilization === null ? '' : `${gpu.utilization.toFixed(0)} %`;
  const parts = [load, filled(gpu.memory_used, gpu.memory_total)].filter(Boolean).join(' · ');
  return `${name} ${parts || NOT_KNOWN}`;
}

const fullness = (gpu: GpuSample) => (gpu.memory_used ?? 0) / (gpu.memory_total || Infinity);

/** Return this GPU, else the busiest; other notebooks' virtual GPUs come last. */
export function choose({ gpus }: Snapshot, uuid: string | null): GpuSample | undefined {
  const own = gpus.find((gpu) => gpu.uuid === uuid);
  if (own) return own;
  const real = gpus.filter((gpu) => !gpu.virtual);
  return (real.length ? real : [...gpus]).sort(
    (a, b) =>
      Number(a.lost) - Number(b.lost) ||
      (b.utilization ?? -1) - (a.utilization ?? -1) ||
      fullness(b) - fullness(a),
  )[0];
}

/** Return the GPU on which this kernel holds most memory; null if it holds none. */
export function ownGpu(snapshot: Snapshot, kernel: string): Own | null {
  const sums = new Map<string, number>();
  const its = snapshot.processes.filter((process) => process.kernel === kernel);
  for (const { uuid, memory } of its) sums.set(uuid, (sums.get(uuid) ?? 0) + (memory ?? 1));
  const most = [...sums].sort(([, a], [, b]) => b - a)[0]?.[0];
  const process = its.find(({ uuid }) => uuid === most);
  if (!process) return null;
  const { uuid, ordinal, notebook } = process;
  return { uuid, ordinal, notebook: notebook && file(notebook) };
}

/** "train.ipynb: cuda:0 97 % · 34.0/80 GiB", or "busiest of 8: …". */
export function statusText(snapshot: Snapshot, own: Own | null, trans: Translate): StatusText {
  const { gpus, problems } = snapshot;
  const gpu = choose(snapshot, own?.uuid ?? null);
  const bad = broken(snapshot);
  const line = (problem: Problem) =>
    bad.includes(problem) ? `${problem.cause}: ${problem.cure}` : problem.cause;
  const lines = gpus.slice(0, LISTED).map((one) => `${describe(one, trans)} · ${one.name ?? ''}`);
  if (gpus.length > LISTED) lines.push(trans.__('and %1 more', gpus.length - LISTED));
  const used = own !== null && gpu?.uuid === own.uuid ? own : null;
  const wrong = bad.length > 0 || gpus.some(({ lost }) => lost);
  const text = gpu
    ? prefix(gpus, used, trans) + describe(gpu, trans, used?.ordinal ?? gpu.ordinal)
    : trans.__('no GPU');
  return {
    text: wrong ? `⚠ ${text}` : text,
    details: [...lines, ...problems.map(line)].join('\n'),
    wrong,
    full: !!gpu && full(gpu),
  };
}

function prefix(gpus: readonly GpuSample[], own: Own | null, trans: Translate): string {
  if (own) return own.notebook ? `${own.notebook}: ` : '';
  const whole = gpus.filter((gpu) => gpu.mig === null && !gpu.virtual).length;
  return whole > 1 ? `${trans.__('busiest of %1', whole)}: ` : '';
}

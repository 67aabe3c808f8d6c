/** The machine in a few words: for the status bar and the alerts. */

import { broken, file, full, label as own, physical } from '../monitor/names.js';
import type { Translate } from '../monitor/shared.js';
import { filled } from '../monitor/units.js';
import type { GpuSample, Snapshot } from '../snapshot.js';

const LISTED = 16;

export interface Brief {
  text: string;
  /** One line for each GPU, then what is wrong. */
  details: string;
  wrong: boolean;
  /** The memory of the GPU that is shown is nearly full. */
  full: boolean;
}

/** The GPU of the current notebook, and what it is called there. */
export interface Own {
  uuid: string;
  ordinal: number | null;
  notebook: string | null;
}

/** What people call it where nothing stands around it: "cuda:0", "GPU 0 MIG 1g.10gb". */
export function label(gpu: GpuSample, ordinal = gpu.ordinal): string {
  return gpu.mig === null ? own(gpu, ordinal) : `${physical(gpu)} ${own(gpu)}`;
}

function reading(gpu: GpuSample, t: Translate, ordinal = gpu.ordinal): string {
  const name = label(gpu, ordinal);
  if (gpu.lost) return `${name} ${t('lost')}`;
  const load = gpu.utilization == null ? '' : `${gpu.utilization.toFixed(0)} %`;
  const parts = [load, filled(gpu.memory_used, gpu.memory_total)].filter(Boolean).join(' · ');
  return `${name} ${parts || t('N/A')}`;
}

const fullness = (gpu: GpuSample) => (gpu.memory_used ?? 0) / (gpu.memory_total || Infinity);

/** The GPU with most of the kernel's memory, else the one that does most: of all, or of the real. */
export function chosen({ gpus }: Snapshot, uuid: string | null): GpuSample | undefined {
  const own = gpus.find((gpu) => gpu.uuid === uuid);
  if (own) return own;
  // Another kernel's virtual GPUs are of no use here.
  const real = gpus.filter((gpu) => !gpu.virtual);
  return (real.length ? real : [...gpus]).sort(
    (a, b) =>
      Number(a.lost) - Number(b.lost) ||
      (b.utilization ?? -1) - (a.utilization ?? -1) ||
      fullness(b) - fullness(a),
  )[0];
}

/** The GPU on which this kernel holds most; null where it holds nothing. */
export function held(snapshot: Snapshot, kernel: string): Own | null {
  const sums = new Map<string, number>();
  const its = snapshot.processes.filter((process) => process.kernel === kernel);
  for (const { uuid, memory: bytes } of its) sums.set(uuid, (sums.get(uuid) ?? 0) + (bytes ?? 1));
  const most = [...sums].sort(([, a], [, b]) => b - a)[0]?.[0];
  const there = its.find((process) => process.uuid === most);
  if (!there) return null;
  const { uuid, ordinal, notebook } = there;
  return { uuid, ordinal, notebook: notebook && file(notebook) };
}

/** "train.ipynb: cuda:0 97 % · 34.0/80 GiB", or "busiest of 8: …". */
export function brief(snapshot: Snapshot, own: Own | null, t: Translate): Brief {
  const { gpus, problems } = snapshot;
  const gpu = chosen(snapshot, own?.uuid ?? null);
  const bad = broken(snapshot);
  const lines = gpus.slice(0, LISTED).map((one) => `${reading(one, t)} · ${one.name ?? ''}`);
  if (gpus.length > LISTED) lines.push(t('and %1 more', gpus.length - LISTED));
  lines.push(
    ...problems.map((one) => (bad.includes(one) ? `${one.cause}: ${one.cure}` : one.cause)),
  );
  const isOwn = own !== null && gpu?.uuid === own.uuid;
  const ordinal = (isOwn ? own.ordinal : null) ?? gpu?.ordinal ?? null;
  const text = gpu ? whose(gpus, isOwn ? own : null, t) + reading(gpu, t, ordinal) : t('no GPU');
  const wrong = bad.length > 0 || gpus.some((one) => one.lost);
  const details = lines.join('\n');
  return { text: wrong ? `⚠ ${text}` : text, details, wrong, full: !!gpu && full(gpu) };
}

function whose(gpus: readonly GpuSample[], own: Own | null, t: Translate): string {
  if (own) return own.notebook ? `${own.notebook}: ` : '';
  const whole = gpus.filter((gpu) => gpu.mig === null && !gpu.virtual).length;
  return whole > 1 ? `${t('busiest of %1', whole)}: ` : '';
}

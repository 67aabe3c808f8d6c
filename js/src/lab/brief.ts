/** The machine in a few words: for the status bar and the alerts. */

import type { Translate } from '../monitor/shared.js';
import { size } from '../monitor/units.js';
import { broken, label as own } from '../monitor/words.js';
import type { GpuSample, Snapshot } from '../snapshot.js';

const GIB = 2 ** 30;
const LISTED = 16;

export interface Brief {
  text: string;
  /** One line for each GPU, then what is wrong. */
  details: string;
  wrong: boolean;
}

/** What people call it where nothing stands around it: "GPU 0", "GPU 0 MIG 1g.10gb", "cuda:0". */
export function label(gpu: GpuSample): string {
  return gpu.mig === null ? own(gpu) : `GPU ${gpu.index ?? '?'} ${own(gpu)}`;
}

const round = (value: number) => value.toFixed(value < 99.95 && value % 1 ? 1 : 0);

/** "12.3/80 GiB"; what is not known is left out. */
function memory(gpu: GpuSample): string {
  const { memory_used: used, memory_total: total } = gpu;
  if (used == null) return '';
  if (total == null) return size(used);
  const [unit, name] = total < GIB ? [2 ** 20, 'MiB'] : [GIB, 'GiB'];
  return `${(used / unit).toFixed(1)}/${round(total / unit)} ${name}`;
}

function reading(gpu: GpuSample, t: Translate): string {
  if (gpu.lost) return `${label(gpu)} ${t('lost')}`;
  const load = gpu.utilization == null ? '' : `${gpu.utilization.toFixed(0)} %`;
  const parts = [load, memory(gpu)].filter(Boolean).join(' · ');
  return `${label(gpu)} ${parts || t('N/A')}`;
}

const fullness = (gpu: GpuSample) => (gpu.memory_used ?? 0) / (gpu.memory_total || Infinity);

/** The GPU with most of the kernel's memory, else the one that does most. */
export function chosen(snapshot: Snapshot, uuid: string | null): GpuSample | undefined {
  const own = snapshot.gpus.find((gpu) => gpu.uuid === uuid);
  if (own) return own;
  return [...snapshot.gpus].sort(
    (a, b) =>
      Number(a.lost) - Number(b.lost) ||
      (b.utilization ?? -1) - (a.utilization ?? -1) ||
      fullness(b) - fullness(a),
  )[0];
}

/** The GPU on which this kernel holds most; null where it holds nothing. */
export function held(snapshot: Snapshot, kernel: string): string | null {
  const sums = new Map<string, number>();
  for (const { uuid, kernel: id, memory: bytes } of snapshot.processes)
    if (id === kernel) sums.set(uuid, (sums.get(uuid) ?? 0) + (bytes ?? 1));
  return [...sums].sort(([, a], [, b]) => b - a)[0]?.[0] ?? null;
}

export function brief(snapshot: Snapshot, uuid: string | null, t: Translate): Brief {
  const { gpus, problems } = snapshot;
  const gpu = chosen(snapshot, uuid);
  const bad = broken(snapshot);
  const more = gpus.length > 1 ? ` +${gpus.length - 1}` : '';
  const lines = gpus.slice(0, LISTED).map((one) => `${reading(one, t)} · ${one.name ?? ''}`);
  if (gpus.length > LISTED) lines.push(t('and %1 more', gpus.length - LISTED));
  lines.push(
    ...problems.map((one) => (bad.includes(one) ? `${one.cause}: ${one.cure}` : one.cause)),
  );
  const text = gpu ? reading(gpu, t) + more : t('no GPU');
  const wrong = bad.length > 0 || gpus.some((one) => one.lost);
  return { text: wrong ? `⚠ ${text}` : text, details: lines.join('\n'), wrong };
}

/** Name GPUs and machines, and describe what is wrong with them. */

import type { GpuSample, Problem, ProcessSample, Snapshot } from '../snapshot.js';
import { outlives, owner, stranger, type View } from './owners.js';
import type { Translate } from './shared.js';
import { age, reading } from './units.js';

const KINDS: Record<string, string> = { intel: 'xpu', apple: 'mps' };
const VENDORS: Record<string, string> = { amd: 'AMD', intel: 'Intel', apple: 'Apple' };

/** Return torch's name of the GPU with this number: "cuda:1" (AMD's too), "xpu:1", or "mps". */
export function torchName(gpu: GpuSample, ordinal: number): string {
  const kind = KINDS[gpu.vendor ?? ''] ?? 'cuda';
  return kind === 'mps' ? kind : `${kind}:${ordinal}`;
}

/** "cuda:1" if known, else "GPU 0"; "MIG 1g.10gb", or "MIG 1g.10gb #2" if there are several. */
export function label(gpu: GpuSample, ordinal = gpu.ordinal, nth = 0): string {
  if (gpu.virtual) return gpu.virtual_ordinal === null ? 'GPU' : `cuda:${gpu.virtual_ordinal}`;
  if (gpu.mig !== null) {
    const profile = (gpu.name ?? '').split('MIG ').at(-1) || gpu.uuid.slice(4, 12);
    return `MIG ${profile}${nth ? ` #${nth}` : ''}`;
  }
  if (ordinal !== null) return torchName(gpu, ordinal) + (gpu.ordinal_certain ? '' : '?');
  return physical(gpu);
}

/** The name in nvidia-smi: "GPU 0"; for other vendors "AMD 0". */
export const physical = (gpu: GpuSample): string =>
  `${VENDORS[gpu.vendor ?? ''] ?? 'GPU'} ${gpu.index ?? gpu.uuid.slice(4, 12)}`;

/** The name outside any list: "cuda:0", "GPU 0 MIG 1g.10gb". */
export const fullLabel = (gpu: GpuSample, ordinal = gpu.ordinal): string =>
  gpu.mig === null ? label(gpu, ordinal) : `${physical(gpu)} ${label(gpu)}`;

/** The CUDA ordinal in this notebook; if it has none, in the process that took the sample. */
export function ordinalOf({ gpu, processes }: View, here: string | null): number | null {
  if (gpu.virtual) return gpu.virtual_ordinal;
  const own = processes.find((process) => owner(process, here) === 'own');
  return own?.ordinal ?? gpu.ordinal;
}

/** The name in this notebook. */
export const labelOf = (view: View, here: string | null): string =>
  label(view.gpu, ordinalOf(view, here), view.nth);

/** The name in nvidia-smi if its number differs: "GPU 1" for cuda:0. */
export function alias(view: View, here: string | null): string {
  const { gpu } = view;
  const ordinal = ordinalOf(view, here);
  const differs = ordinal !== null && gpu.index !== null && ordinal !== gpu.index;
  return differs && !gpu.virtual && gpu.mig === null ? physical(gpu) : '';
}

/** Explain the number in `physical`. */
export function aliasHint({ vendor }: GpuSample, trans: Translate): string {
  const tool = { nvidia: 'nvidia-smi', amd: 'amd-smi' }[vendor ?? ''];
  return tool ? trans.__('the number in %1', tool) : trans.__('its number on this machine');
}

/** "1 GPU", "8 GPUs". */
export const gpuCount = (trans: Translate, count: number): string =>
  trans._n('%1 GPU', '%1 GPUs', count);

/** "train.ipynb" from "work/train.ipynb". */
export const file = (path: string): string => path.slice(path.lastIndexOf('/') + 1);

/** Makers, brands, and what follows the model: bus, memory. */
const NO_MODEL =
  /^((NVIDIA|AMD|Intel|Apple|GeForce|Tesla|Quadro|Instinct|Radeon|Data Center GPU) )+|[ -](\d+GB|SXM|PCIe|HBM|NVL|OAM|Generation).*/gi;

/** "H100" of "NVIDIA H100 80GB HBM3"; a virtual GPU has the name it was given. */
export function model({ gpu, migs }: View, trans: Translate): string {
  const name = gpu.name ?? '';
  if (gpu.virtual) return /^virtual gpu$/i.test(name) ? trans.__('virtual') : name;
  return [name.replace(NO_MODEL, '') || trans.__('unknown model'), migs.length ? 'MIG' : '']
    .filter(Boolean)
    .join(' ');
}

/** "train.ipynb", "alice" for another user, "python3", "exited (PID 123)". */
export function holderName(main: ProcessSample, trans: Translate): string {
  if (main.notebook && !outlives(main)) return file(main.notebook);
  if (main.mine) return trans.__('this kernel');
  if (stranger(main)) return main.user as string;
  if (main.kernel && !main.name) return trans.__('kernel (PID %1)', main.pid);
  return main.name ?? trans.__('exited (PID %1)', main.pid);
}

/** A few words and their color: "bad" is a fault, "warn" is worth knowing. */
export type Badge = readonly [text: string, tone: 'bad' | 'warn' | ''];

/** ["CUDA 13.0"]; AMD's begin with "ROCm 6.2.4". */
export const drivers = ({ driver, cuda, software }: Snapshot, trans: Translate): string[] => [
  ...(cuda || driver ? [cuda ? `CUDA ${cuda}` : trans.__('driver %1', driver ?? '')] : []),
  ...software,
];

/** "1755 / 1980 MHz"; null if unknown. */
export const clock = (now: number | null, limit: number | null): string | null =>
  now === null ? null : `${now}${limit === null ? '' : ` / ${limit}`} MHz`;

export function hot({ temperature, temperature_limit: limit }: GpuSample): boolean {
  return temperature !== null && limit !== null && temperature >= limit;
}

/** From this share of its memory on, a GPU counts as full. */
const FULL = 0.95;

export function full({ memory_used: used, memory_total: total, ...gpu }: GpuSample): boolean {
  const reserved = gpu.unified ? 0 : (gpu.memory_reserved ?? 0);
  return used !== null && !!total && (used + reserved) / total >= FULL;
}

/** What is wrong with the GPU, or slows it down; its line says if it is lost. */
export function faults(gpu: GpuSample, trans: Translate): Badge[] {
  const found: Badge[] = [];
  if (gpu.xid !== null) found.push([`Xid ${gpu.xid}`, 'bad']);
  if (gpu.ecc_uncorrected) found.push([trans.__('%1 uncorrected ECC', gpu.ecc_uncorrected), 'bad']);
  const { temperature, temperature_limit: limit } = gpu;
  const degrees = [reading(temperature, '°C'), reading(limit, '°C')] as const;
  if (hot(gpu)) found.push([trans.__('hot: %1, limit %2', ...degrees), 'bad']);
  // A busy GPU normally runs at its power cap.
  const slow = (gpu.throttle ?? []).filter((reason) => reason !== 'power cap');
  const clocks = clock(gpu.sm_clock, gpu.sm_clock_limit);
  if (slow.length)
    found.push([trans.__('throttled: %1', [...slow, clocks].filter(Boolean).join(', ')), 'warn']);
  if (gpu.age >= 3) found.push([trans.__('%1 old', age(gpu.age)), 'warn']);
  return found;
}

/** Problems that only explain why there is no GPU; nothing is broken. */
const JUST_NO_GPU = ['no-gpu', 'library-missing', 'driver-not-loaded', 'pynvml-missing'];

/** Return the problems that need attention. */
export const broken = ({ gpus, problems }: Snapshot): Problem[] =>
  problems.filter((problem) => gpus.length > 0 || !JUST_NO_GPU.includes(problem.code));

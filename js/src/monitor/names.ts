/** What a GPU is called, and what is to be said of its state. */

import type { GpuSample, Problem, Snapshot } from '../snapshot.js';
import { owner, type View } from './owners.js';
import type { Translate } from './shared.js';
import { age } from './units.js';

const KINDS: Record<string, string> = { intel: 'xpu', apple: 'mps' };

/** What torch calls a GPU of this number: "cuda:1", also AMD's, "xpu:1", or "mps". */
export function torchName(gpu: GpuSample, ordinal: number): string {
  const kind = KINDS[gpu.vendor ?? ''] ?? 'cuda';
  return kind === 'mps' ? kind : `${kind}:${ordinal}`;
}

/** "cuda:1" where it is known which that is, else "GPU 0"; "MIG 1g.10gb", "MIG 1g.10gb #2". */
export function label(gpu: GpuSample, ordinal = gpu.ordinal, nth = 0): string {
  if (gpu.virtual) return gpu.virtual_ordinal === null ? 'GPU' : `cuda:${gpu.virtual_ordinal}`;
  if (gpu.mig !== null) {
    const profile = (gpu.name ?? '').split('MIG ').at(-1) || gpu.uuid.slice(4, 12);
    return `MIG ${profile}${nth ? ` #${nth}` : ''}`;
  }
  if (ordinal !== null) return torchName(gpu, ordinal) + (gpu.ordinal_certain ? '' : '?');
  return physical(gpu);
}

const VENDORS: Record<string, string> = { amd: 'AMD', intel: 'Intel', apple: 'Apple' };

/** What nvidia-smi calls it: "GPU 0"; of those that others count, "AMD 0". */
export const physical = (gpu: GpuSample): string =>
  `${VENDORS[gpu.vendor ?? ''] ?? 'GPU'} ${gpu.index ?? gpu.uuid.slice(4, 12)}`;

/** CUDA's number of it in this notebook, or where there is none, in the process that looked. */
export function ordinalOf({ gpu, processes }: View, here: string | null): number | null {
  if (gpu.virtual) return gpu.virtual_ordinal;
  const own = processes.find((process) => owner(process, here) === 'mine');
  return own?.ordinal ?? gpu.ordinal;
}

/** What it is called in this notebook. */
export const called = (view: View, here: string | null): string =>
  label(view.gpu, ordinalOf(view, here), view.nth);

/** Its other name where that has another number: "GPU 1" of cuda:0. */
export function also(view: View, here: string | null): string {
  const { gpu } = view;
  const ordinal = ordinalOf(view, here);
  const differs = ordinal !== null && gpu.index !== null && ordinal !== gpu.index;
  return differs && !gpu.virtual && gpu.mig === null ? physical(gpu) : '';
}

/** Where one finds that other number. */
export function numbered({ vendor }: GpuSample, t: Translate): string {
  if (vendor === 'amd') return t('the number in amd-smi');
  const other = vendor === 'intel' || vendor === 'apple';
  return other ? t('its number on this machine') : t('the number in nvidia-smi');
}

/** "train.ipynb" of "work/train.ipynb". */
export const file = (path: string): string => path.slice(path.lastIndexOf('/') + 1);

/** The model; none of a virtual GPU, but the name that it was given. */
export function model({ gpu }: View, t: Translate): string {
  if (gpu.virtual) {
    return /^virtual gpu$/i.test(gpu.name ?? '') ? '' : (gpu.name ?? '');
  }
  return (gpu.name ?? t('GPU of unknown model')).replace(/^NVIDIA /, '');
}

/** A few words, and how they look: "bad" is a fault, "warn" is a thing to know. */
export type Badge = readonly [text: string, look: 'bad' | 'warn' | ''];

/** What it is, which does not change from tick to tick. */
export function kinds({ gpu, migs }: View, t: Translate): Badge[] {
  const found: Badge[] = [];
  if (gpu.virtual) found.push([t('virtual'), '']);
  if (migs.length) found.push(['MIG', '']);
  return found;
}

export function hot(gpu: GpuSample): boolean {
  const { temperature, temperature_limit: limit } = gpu;
  return temperature !== null && limit !== null && temperature >= limit;
}

/** From this share of its memory on it counts as full. */
const FULL = 0.95;

export function full({ memory_used: used, memory_total: total, ...gpu }: GpuSample): boolean {
  const reserved = gpu.unified ? 0 : (gpu.memory_reserved ?? 0);
  return used !== null && !!total && (used + reserved) / total >= FULL;
}

/** What is wrong with it, or holds it back. */
export function faults(gpu: GpuSample, t: Translate): Badge[] {
  const found: Badge[] = [];
  if (gpu.lost) found.push([t('lost'), 'bad']);
  if (gpu.xid !== null) found.push([`Xid ${gpu.xid}`, 'bad']);
  if (gpu.ecc_uncorrected) found.push([t('%1 uncorrected ECC', gpu.ecc_uncorrected), 'bad']);
  if (hot(gpu)) found.push([t('hot'), 'bad']);
  // At full load the power cap is where a GPU should be.
  const slow = (gpu.throttle ?? []).filter((reason) => reason !== 'power cap');
  if (slow.length) found.push([t('throttled: %1', slow.join(', ')), 'warn']);
  if (gpu.age >= 3) found.push([t('%1 old', age(gpu.age)), 'warn']);
  return found;
}

/** Where there is no GPU these say only why; nothing is broken. */
const JUST_NO_GPU = ['no-gpu', 'library-missing', 'driver-not-loaded', 'pynvml-missing'];

/** The problems about which something should be done. */
export const broken = ({ gpus, problems }: Snapshot): Problem[] =>
  problems.filter((problem) => gpus.length > 0 || !JUST_NO_GPU.includes(problem.code));

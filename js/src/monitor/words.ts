/** What a GPU is called, and what is to be said of its state. */

import type { GpuSample, Problem, Snapshot } from '../snapshot.js';
import type { Translate } from './shared.js';
import type { View } from './split.js';
import { age } from './units.js';

/** "GPU 0", "cuda:1" of a virtual one, "MIG 1g.10gb". */
export function label(gpu: GpuSample): string {
  if (gpu.virtual) return gpu.virtual_ordinal === null ? 'GPU' : `cuda:${gpu.virtual_ordinal}`;
  if (gpu.mig !== null)
    return `MIG ${(gpu.name ?? '').split('MIG ').at(-1) || gpu.uuid.slice(4, 12)}`;
  return `GPU ${gpu.index ?? gpu.uuid.slice(4, 12)}`;
}

/** The model; of a virtual GPU, whose cuda:0 it is. */
export function model({ gpu, processes }: View, t: Translate): string {
  if (gpu.virtual) {
    const book = processes.find((process) => process.notebook)?.notebook;
    if (book) return book.slice(book.lastIndexOf('/') + 1);
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

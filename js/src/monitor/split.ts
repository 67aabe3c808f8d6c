/** Who holds how much: the sums behind the bars and the process rows. */

import type { GpuSample, ProcessSample, Snapshot } from '../snapshot.js';

export type Owner = 'mine' | 'books' | 'others';

/** Bytes of one GPU by owner; all 0 where `known` is false. */
export interface Parts {
  mine: number;
  books: number;
  others: number;
  reserved: number;
  free: number;
  known: boolean;
}

/** One GPU with what belongs to it. */
export interface View {
  gpu: GpuSample;
  migs: View[];
  processes: ProcessSample[];
  parts: Parts;
  /** Of those who cannot be seen; 0 where nothing can be said. */
  unseen: number;
}

// A driver's own rounding, and what it holds without a process, is not somebody's memory.
const NOBODYS = 32 * 2 ** 20;
const UNKNOWN: Parts = { mine: 0, books: 0, others: 0, reserved: 0, free: 0, known: false };

/** Whose memory it is; `here` is the kernel of this notebook. */
export function owner(process: ProcessSample, here: string | null): Owner {
  if (process.mine || (here !== null && process.kernel === here && !process.orphan)) return 'mine';
  return (process.kernel || process.notebook) && !process.orphan ? 'books' : 'others';
}

/** How one GPU's memory is shared out: "others" is what is used and is no notebook's. */
export function split(gpu: GpuSample, processes: ProcessSample[], here: string | null): Parts {
  const { memory_total: total, memory_used: used } = gpu;
  if (total === null || used === null) return UNKNOWN;
  let mine = 0;
  let books = 0;
  for (const process of processes) {
    const whose = owner(process, here);
    if (whose === 'mine') mine += process.memory ?? 0;
    else if (whose === 'books') books += process.memory ?? 0;
  }
  mine = Math.min(mine, used);
  books = Math.min(books, used - mine);
  const reserved = gpu.memory_reserved ?? 0;
  const free = Math.max(total - used - reserved, 0);
  return { mine, books, others: used - mine - books, reserved, free, known: true };
}

/** The GPUs of a snapshot, each with its MIG devices and its processes. */
export function views(snapshot: Snapshot, here: string | null): View[] {
  const held = new Map<string, ProcessSample[]>();
  for (const process of snapshot.processes) {
    const list = held.get(process.uuid);
    if (list) list.push(process);
    else held.set(process.uuid, [process]);
  }
  const parents = new Set(snapshot.gpus.map((gpu) => gpu.uuid));
  const children = new Map<string, View[]>();
  const whole: View[] = [];
  const make = (gpu: GpuSample, migs: View[]): View => {
    const processes = held.get(gpu.uuid) ?? [];
    // A parent's memory is that of its MIG devices.
    const all = migs.length ? [...processes, ...migs.flatMap((mig) => mig.processes)] : processes;
    const parts = split(gpu, all, here);
    return { gpu, migs, processes, parts, unseen: migs.length ? 0 : unseen(gpu, processes) };
  };
  for (const gpu of snapshot.gpus) {
    if (gpu.mig === null || !parents.has(gpu.mig)) continue;
    const list = children.get(gpu.mig) ?? [];
    list.push(make(gpu, []));
    children.set(gpu.mig, list);
  }
  for (const gpu of snapshot.gpus) {
    if (gpu.mig !== null && parents.has(gpu.mig)) continue;
    whole.push(make(gpu, children.get(gpu.uuid) ?? []));
  }
  return whole;
}

function unseen(gpu: GpuSample, processes: ProcessSample[]): number {
  if (gpu.memory_used === null || gpu.unified) return 0;
  let rest = gpu.memory_used;
  for (const process of processes) {
    if (process.memory === null) return 0;
    rest -= process.memory;
  }
  return rest > NOBODYS ? rest : 0;
}

/** A row of the list of processes: a notebook with its workers, a program, or another user. */
export interface Group {
  key: string;
  owner: Owner;
  /** The kernel itself, where it is among them. */
  main: ProcessSample;
  all: ProcessSample[];
  /** Bytes over all of them; null where none is known. */
  memory: number | null;
}

/** Someone else's: no more than a name and bytes is told. */
export function stranger(process: ProcessSample): boolean {
  return !process.name && !process.notebook && !process.kernel && !process.mine && !!process.user;
}

/** Processes by notebook or program: this notebook first, then by memory. */
export function groups(processes: ProcessSample[], here: string | null): Group[] {
  const found = new Map<string, Group>();
  for (const process of processes) {
    const key = keyOf(process);
    const group = found.get(key);
    if (!group) {
      const whose = owner(process, here);
      found.set(key, { key, owner: whose, main: process, all: [process], memory: process.memory });
      continue;
    }
    group.all.push(process);
    if (group.main.child && !process.child) group.main = process;
    if (process.memory !== null) group.memory = (group.memory ?? 0) + process.memory;
    if (owner(process, here) === 'mine') group.owner = 'mine';
  }
  return [...found.values()].sort(
    (a, b) =>
      Number(b.owner === 'mine') - Number(a.owner === 'mine') ||
      (b.memory ?? 0) - (a.memory ?? 0) ||
      (a.key < b.key ? -1 : 1),
  );
}

function keyOf(process: ProcessSample): string {
  if (process.orphan) return `pid ${process.pid}`;
  if (process.kernel) return `kernel ${process.kernel}`;
  if (process.notebook) return `book ${process.mine} ${process.notebook} ${process.user}`;
  return stranger(process) ? `user ${process.user}` : `pid ${process.pid}`;
}

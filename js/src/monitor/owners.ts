/** Who holds how much: the sums behind the charts, the bars and the process rows. */

import type { GpuSample, ProcessSample, Snapshot } from '../snapshot.js';

/** Whose memory it can be, in the order of every chart and bar. */
export const OWNERS = ['mine', 'books', 'others', 'left', 'unseen', 'driver'] as const;
export type Owner = (typeof OWNERS)[number];

/** Bytes of one GPU by owner; all 0 where `known` is false. */
export type Parts = Record<Owner, number> & { free: number; known: boolean };

/** One GPU with what belongs to it. */
export interface View {
  gpu: GpuSample;
  migs: View[];
  processes: ProcessSample[];
  parts: Parts;
  /** Bytes that no process accounts for; 0 where some process does not tell how much it holds. */
  unseen: number;
  /** Which of those MIG devices of its parent it is that have its name; 0 where it is the only one. */
  nth: number;
  /** It is open where the reader has not said. */
  standing: boolean;
}

/** Bytes by holder: "mine", "left", "others", or the kernel of a notebook. */
export type Held = ReadonlyMap<string, number>;

// A driver's own rounding, and what it holds without a process, is not somebody's memory.
const NOBODYS = 32 * 2 ** 20;
const NOTHING: Held = new Map();

function holder(process: ProcessSample): string {
  if (process.orphan) return 'left';
  if (process.mine) return 'mine';
  return process.kernel ?? process.notebook ?? 'others';
}

/** Whose the memory of a holder is; `here` is the kernel of this notebook. */
export function ownerOf(held: string, here: string | null): Owner {
  if (held === here) return 'mine';
  return held === 'mine' || held === 'left' || held === 'others' ? held : 'books';
}

export const owner = (process: ProcessSample, here: string | null): Owner =>
  ownerOf(holder(process), here);

/** Bytes by GPU and by holder; a GPU has those of its MIG devices too. */
export function heldBy({ gpus, processes }: Snapshot): Map<string, Map<string, number>> {
  const parents = new Map(gpus.map((gpu) => [gpu.uuid, gpu.mig]));
  const all = new Map<string, Map<string, number>>();
  for (const process of processes) {
    const key = holder(process);
    for (const uuid of [process.uuid, parents.get(process.uuid)]) {
      if (!uuid) continue;
      const one = all.get(uuid) ?? new Map<string, number>();
      all.set(uuid, one.set(key, (one.get(key) ?? 0) + (process.memory ?? 0)));
    }
  }
  return all;
}

/** How `used` bytes are shared out: each holder at most what is left, then what nobody holds. */
export function shared(used: number, held: Held, here: string | null): Record<Owner, number> {
  const parts = { mine: 0, books: 0, others: 0, left: 0, unseen: 0, driver: 0 };
  for (const [key, bytes] of held) parts[ownerOf(key, here)] += bytes;
  let rest = used;
  for (const name of OWNERS) rest -= parts[name] = Math.min(parts[name], rest);
  if (rest > NOBODYS) parts.unseen = rest;
  else parts.driver = rest;
  return parts;
}

/** How one GPU's memory is shared out. */
export function split(gpu: GpuSample, held: Held | undefined, here: string | null): Parts {
  const { memory_total: total, memory_used: used } = gpu;
  const known = total !== null && used !== null;
  const parts = shared(known ? used : 0, known ? (held ?? NOTHING) : NOTHING, here);
  if (!known) return { ...parts, free: 0, known };
  const reserved = gpu.memory_reserved ?? 0;
  parts.driver += reserved;
  return { ...parts, free: Math.max(total - used - reserved, 0), known };
}

/** Those that are no part of another one of them. */
export function whole(gpus: readonly GpuSample[]): GpuSample[] {
  const all = new Set<string | null>(gpus.map(({ uuid }) => uuid));
  return gpus.filter(({ mig }) => !all.has(mig));
}

/** The GPUs of a snapshot, each with its MIG devices and its processes. */
export function views(snapshot: Snapshot, here: string | null): View[] {
  const held = heldBy(snapshot);
  const on = new Map<string, ProcessSample[]>();
  for (const process of snapshot.processes) {
    const list = on.get(process.uuid);
    if (list) list.push(process);
    else on.set(process.uuid, [process]);
  }
  const tops = new Set(whole(snapshot.gpus));
  const make = (gpu: GpuSample, migs: View[]): View => {
    const processes = on.get(gpu.uuid) ?? [];
    const parts = split(gpu, held.get(gpu.uuid), here);
    const silent = migs.length || gpu.unified || processes.some(({ memory }) => memory === null);
    return {
      gpu,
      migs,
      processes,
      parts,
      unseen: silent ? 0 : parts.unseen,
      nth: 0,
      standing: false,
    };
  };
  const children = new Map<string | null, View[]>();
  for (const gpu of snapshot.gpus.filter((gpu) => !tops.has(gpu))) {
    const list = children.get(gpu.mig) ?? [];
    list.push(make(gpu, []));
    children.set(gpu.mig, list);
  }
  for (const list of children.values()) number(list);
  return [...tops].map((gpu) => make(gpu, children.get(gpu.uuid) ?? []));
}

/** Tells MIG devices of one name apart. */
function number(slices: View[]): void {
  for (const slice of slices) {
    const same = slices.filter(({ gpu }) => gpu.name === slice.gpu.name);
    if (same.length > 1) slice.nth = same.indexOf(slice) + 1;
  }
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

/** A notebook started it, and it was made to live on without its kernel: a server, a tmux. */
export const outlives = (process: ProcessSample): boolean =>
  process.notebook !== null &&
  process.kernel === null &&
  process.name !== null &&
  !process.orphan &&
  !process.mine;

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
  if (process.orphan || outlives(process)) return `pid ${process.pid}`;
  if (process.kernel) return `kernel ${process.kernel}`;
  if (process.notebook) return `book ${process.mine} ${process.notebook} ${process.user}`;
  return stranger(process) ? `user ${process.user}` : `pid ${process.pid}`;
}

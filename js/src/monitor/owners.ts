/** Attribute memory to owners: the sums behind the charts, the bars and the process rows. */

import type { GpuSample, ProcessSample, Snapshot } from '../snapshot.js';

/** Kinds of owner, in the order of every chart and bar. */
export const OWNERS = ['own', 'ownOther', 'other', 'orphan', 'system'] as const;
/** Drawn as stripes. */
export const STRIPED: readonly string[] = ['orphan', 'system'];
export type Owner = (typeof OWNERS)[number];

/** Bytes on one GPU by owner; all 0 if `known` is false. */
export type Parts = Record<Owner, number> & { free: number; known: boolean };

/** One GPU with its MIG devices and its processes. */
export interface View {
  gpu: GpuSample;
  migs: View[];
  processes: ProcessSample[];
  parts: Parts;
  /** Bytes that no process holds, if they are many and each process reports its memory; else 0. */
  system: number;
  /** Its number among MIG devices of the same name and parent; 0 if the name is unique. */
  nth: number;
}

/** Bytes by holder: "mine", "left", "others", or a kernel's id. */
type Held = Record<string, number>;

/** Up to so much memory that no process holds is normal: the driver's. As a share of the total, too. */
const MUCH = 2 ** 30;
const MUCH_SHARE = 0.02;

function holderOf(process: ProcessSample): string {
  if (process.orphan) return 'left';
  if (process.mine) return 'mine';
  return process.kernel ?? process.notebook ?? 'others';
}

/** Return the owner of a holder's memory; `here` is the current notebook's kernel. */
export function ownerOf(holder: string, here: string | null): Owner {
  if (holder === here || holder === 'mine') return 'own';
  if (holder === 'left') return 'orphan';
  return holder === 'others' ? 'other' : 'ownOther';
}

export const owner = (process: ProcessSample, here: string | null): Owner =>
  ownerOf(holderOf(process), here);

/** Return the bytes of each GPU's holders, by UUID; a GPU includes its MIG devices. */
export function holders({ gpus, processes }: Pick<Snapshot, 'gpus' | 'processes'>) {
  const parents = new Map(gpus.map((gpu) => [gpu.uuid, gpu.mig]));
  const all = new Map<string, Held>();
  for (const process of processes) {
    const holder = holderOf(process);
    for (const uuid of [process.uuid, parents.get(process.uuid)]) {
      if (!uuid) continue;
      const held = all.get(uuid) ?? {};
      held[holder] = (held[holder] ?? 0) + (process.memory ?? 0);
      all.set(uuid, held);
    }
  }
  return all;
}

/** Split the used memory of a GPU by owner. The parts never exceed what is used. */
export function split(gpu: GpuSample, held: Held | undefined, here: string | null): Parts {
  const { memory_total: total, memory_used: used } = gpu;
  const parts: Parts = {
    own: 0,
    ownOther: 0,
    other: 0,
    orphan: 0,
    system: 0,
    free: 0,
    known: total !== null && used !== null,
  };
  if (total === null || used === null) return parts;
  for (const [holder, bytes] of Object.entries(held ?? {})) parts[ownerOf(holder, here)] += bytes;
  let rest = used;
  for (const name of OWNERS) rest -= parts[name] = Math.min(parts[name], rest);
  parts.system = rest + (gpu.memory_reserved ?? 0);
  parts.free = Math.max(total - used - (gpu.memory_reserved ?? 0), 0);
  return parts;
}

/** Return the GPUs without the MIG devices whose parent is among them. */
export function whole(gpus: readonly GpuSample[]): GpuSample[] {
  const all = new Set<string | null>(gpus.map(({ uuid }) => uuid));
  return gpus.filter(({ mig }) => !all.has(mig));
}

/** Return the GPUs of a snapshot, each with its MIG devices and processes. */
export function views(snapshot: Snapshot, here: string | null): View[] {
  const held = holders(snapshot);
  const make = (gpu: GpuSample, migs: View[]): View => {
    const processes = snapshot.processes.filter(({ uuid }) => uuid === gpu.uuid);
    const parts = split(gpu, held.get(gpu.uuid), here);
    const silent = migs.length || gpu.unified || processes.some(({ memory }) => memory === null);
    const much = parts.system > Math.min(MUCH, MUCH_SHARE * (gpu.memory_total ?? 0));
    return { gpu, migs, processes, parts, system: much && !silent ? parts.system : 0, nth: 0 };
  };
  const tops = whole(snapshot.gpus);
  return tops.map((parent) => {
    const migs = snapshot.gpus
      .filter(({ mig, uuid }) => mig === parent.uuid && uuid !== mig)
      .map((gpu) => make(gpu, []));
    for (const mig of migs) {
      const same = migs.filter(({ gpu }) => gpu.name === mig.gpu.name);
      if (same.length > 1) mig.nth = same.indexOf(mig) + 1;
    }
    return make(parent, migs);
  });
}

/** A row of the list of processes: a notebook with its workers, a program, or another user. */
export interface Group {
  key: string;
  owner: Owner;
  /** The kernel itself if it is among them. */
  main: ProcessSample;
  all: ProcessSample[];
  /** The sum of their bytes; null if all are unknown. */
  memory: number | null;
}

/** Whether the process is another user's: only the user and the bytes are visible. */
export const stranger = (process: ProcessSample): boolean =>
  !process.name && !process.notebook && !process.kernel && !process.mine && !!process.user;

/** Whether a notebook started it to outlive its kernel: a server, or something in tmux. */
export const outlives = (process: ProcessSample): boolean =>
  process.notebook !== null &&
  process.kernel === null &&
  process.name !== null &&
  !process.orphan &&
  !process.mine;

/** Group processes by notebook or program: this notebook first, then by memory. */
export function groups(processes: ProcessSample[], here: string | null): Group[] {
  const found = new Map<string, Group>();
  for (const process of processes) {
    const key = keyOf(process);
    const whose = owner(process, here);
    const group = found.get(key);
    if (!group) {
      found.set(key, { key, owner: whose, main: process, all: [process], memory: process.memory });
      continue;
    }
    group.all.push(process);
    if (group.main.child && !process.child) group.main = process;
    if (process.memory !== null) group.memory = (group.memory ?? 0) + process.memory;
    if (whose === 'own') group.owner = whose;
  }
  return [...found.values()].sort(
    (a, b) =>
      Number(b.owner === 'own') - Number(a.owner === 'own') ||
      (b.memory ?? 0) - (a.memory ?? 0) ||
      (b.main.host_memory ?? 0) - (a.main.host_memory ?? 0) ||
      (a.key < b.key ? -1 : 1),
  );
}

function keyOf(process: ProcessSample): string {
  if (process.orphan || outlives(process)) return `pid ${process.pid}`;
  if (process.kernel) return `kernel ${process.kernel}`;
  if (process.notebook) return `book ${process.mine} ${process.notebook} ${process.user}`;
  return stranger(process) ? `user ${process.user}` : `pid ${process.pid}`;
}

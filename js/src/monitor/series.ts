/** The past of each GPU, and the cells that ran in it. */

import type { CellRun, History, Snapshot } from '../snapshot.js';

/** Samples kept; the oldest quarter goes when there are more. */
const KEPT = 1600;

/** NaN is "not known". */
export interface Column {
  utilization: number[];
  memory: number[];
}

/** What a cell did to one GPU: null where no sample was taken while it ran. */
export interface Stats {
  peak: number | null;
  mean: number | null;
}

/** Columns over one axis of time. */
export class Series {
  time: number[] = [];
  #gpus = new Map<string, Column>();

  column(uuid: string): Column {
    let found = this.#gpus.get(uuid);
    if (!found) {
      found = { utilization: [], memory: [] };
      this.#gpus.set(uuid, found);
    }
    // One that came late, or was away, has nothing to say of that time.
    while (found.utilization.length < this.time.length) {
      found.utilization.push(Number.NaN);
      found.memory.push(Number.NaN);
    }
    return found;
  }

  /** Adds a snapshot's values; what is not newer than the last adds nothing. */
  push(snapshot: Snapshot): void {
    const last = this.time.at(-1);
    if (last !== undefined && snapshot.time <= last) return;
    for (const gpu of snapshot.gpus) {
      const column = this.column(gpu.uuid);
      // Values that the driver gave some time ago are not those of now.
      const old = gpu.lost || gpu.age > 1;
      column.utilization.push(old ? Number.NaN : (gpu.utilization ?? Number.NaN));
      column.memory.push(old ? Number.NaN : (gpu.memory_used ?? Number.NaN));
    }
    this.time.push(snapshot.time);
    if (this.time.length > KEPT) this.#forget(KEPT / 4);
  }

  /** Puts the history in the place of what is known of the same time. */
  seed(history: History): void {
    const times = history.time;
    const [first, last] = [times[0], times.at(-1)];
    if (first === undefined || last === undefined) return;
    const old = this.time;
    const before = old.filter((time) => time < first).length;
    const after = old.filter((time) => time <= last).length;
    const uuids = new Set([...this.#gpus.keys(), ...Object.keys(history.gpus)]);
    const merged = (was: number[], told: (number | null)[] | undefined): number[] => [
      ...was.slice(0, before),
      ...times.map((_, n) => told?.[n] ?? Number.NaN),
      ...was.slice(after),
    ];
    for (const uuid of uuids) {
      const was = this.column(uuid);
      const told = history.gpus[uuid];
      this.#gpus.set(uuid, {
        utilization: merged(was.utilization, told?.utilization),
        memory: merged(was.memory, told?.memory_used),
      });
    }
    this.time = [...old.slice(0, before), ...times, ...old.slice(after)];
    if (this.time.length > KEPT) this.#forget(this.time.length - KEPT);
  }

  /** The index of the first sample at or after `time`. */
  from(time: number): number {
    let low = 0;
    let high = this.time.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((this.time[middle] as number) < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Peak memory and mean utilisation of one GPU over a time. */
  stats(uuid: string, start: number, end: number): Stats {
    const { utilization, memory } = this.column(uuid);
    const [first, past] = [this.from(start), this.from(end + 1e-6)];
    const peaks = memory.slice(first, past).filter((value) => !Number.isNaN(value));
    const means = utilization.slice(first, past).filter((value) => !Number.isNaN(value));
    return {
      peak: peaks.length ? peaks.reduce((a, b) => Math.max(a, b)) : null,
      mean: means.length ? means.reduce((a, b) => a + b, 0) / means.length : null,
    };
  }

  #forget(count: number): void {
    for (const [uuid, column] of this.#gpus) {
      this.column(uuid);
      column.utilization.splice(0, count);
      column.memory.splice(0, count);
      if (column.memory.every(Number.isNaN)) this.#gpus.delete(uuid);
    }
    this.time.splice(0, count);
  }
}

/** Cell runs by GPU, oldest first; those of long ago are forgotten. */
export class Runs {
  #runs = new Map<string, CellRun>();
  #gpus = new Map<string, CellRun[]>();

  merge(cells: CellRun[], now: number): void {
    for (const cell of cells) this.#runs.set(cell.id, cell);
    this.#gpus.clear();
    for (const [id, run] of this.#runs) {
      if (run.end !== null && now - run.end > KEPT) this.#runs.delete(id);
      else
        for (const uuid of run.gpus) this.#gpus.set(uuid, [...(this.#gpus.get(uuid) ?? []), run]);
    }
  }

  /** Those that touched a GPU. */
  of(uuid: string): readonly CellRun[] {
    return this.#gpus.get(uuid) ?? [];
  }
}

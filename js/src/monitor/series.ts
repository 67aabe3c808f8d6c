/** The past of each GPU, and the cells that ran in it. */

import type { CellRun, History, Snapshot } from '../snapshot.js';

/** Samples kept; the oldest quarter goes when there are more. */
const KEPT = 1600;
/** Seconds for which cells are kept: the longest time that a chart shows. */
const KEPT_S = 3600;
/** A clock that went back by more than this was set. */
const SET_BACK_S = 60;

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

/** Whether the way from sample n - 1 to n was not watched: far longer than those beside it. */
export function gap(time: readonly number[], n: number): boolean {
  const [a, b] = [time[n - 1], time[n]];
  if (a === undefined || b === undefined) return true;
  if (b - a < 5) return false;
  const usual = Math.max(a - (time[n - 2] ?? a), (time[n + 1] ?? b) - b);
  return b - a > 3 * usual;
}

/** Columns over one axis of time. */
export class Series {
  time: number[] = [];
  /** Seconds; of samples that come faster, one is made. */
  step = 0;
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
    const last = this.time.at(-1) ?? Number.NEGATIVE_INFINITY;
    if (last - snapshot.time > SET_BACK_S) this.#keep(0, this.from(snapshot.time));
    else if (snapshot.time <= last) return;
    for (const gpu of snapshot.gpus) {
      const column = this.column(gpu.uuid);
      // Values that the driver gave some time ago are not those of now.
      const old = gpu.lost || gpu.age > 1;
      column.utilization.push(old ? Number.NaN : (gpu.utilization ?? Number.NaN));
      column.memory.push(old ? Number.NaN : (gpu.memory_used ?? Number.NaN));
    }
    this.time.push(snapshot.time);
    const n = this.time.length - 1;
    if (snapshot.time - (this.time[n - 2] ?? 0) < this.step) this.#join(n - 1);
    if (n >= KEPT) this.#keep(KEPT / 4, n + 1);
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
    this.#keep(Math.max(this.time.length - KEPT, 0), this.time.length);
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

  /** Peak memory and mean utilization of one GPU over a time. */
  stats(uuid: string, start: number, end: number): Stats {
    const { utilization, memory } = this.column(uuid);
    const [first, past] = [this.from(start), this.from(end + 1e-6)];
    const peaks = memory.slice(first, past).filter((value) => !Number.isNaN(value));
    let [sum, seconds] = [0, 0];
    for (let n = first; n <= past && n < this.time.length; n++) {
      // Utilization is of the time before its sample, most of which must be the cell's.
      const to = this.time[n] as number;
      const from = gap(this.time, n) ? to - 1 : (this.time[n - 1] as number);
      const common = Math.min(end, to) - Math.max(start, from);
      const value = utilization[n] as number;
      if (Number.isNaN(value) || common < (to - from) / 2) continue;
      sum += value * common;
      seconds += common;
    }
    return {
      peak: peaks.length ? peaks.reduce((a, b) => Math.max(a, b)) : null,
      mean: seconds ? sum / seconds : null,
    };
  }

  #keep(first: number, past: number): void {
    for (const [uuid, { utilization, memory }] of this.#columns()) {
      const kept = memory.slice(first, past);
      if (kept.every(Number.isNaN)) this.#gpus.delete(uuid);
      else this.#gpus.set(uuid, { utilization: utilization.slice(first, past), memory: kept });
    }
    this.time = this.time.slice(first, past);
  }

  /** Makes one sample of number n and the next: their mean utilization, their peak memory. */
  #join(n: number): void {
    const [before, a, b] = this.time.slice(n - 1) as [number, number, number];
    const share = (b - a) / (b - before);
    const join = (values: number[], of: (a: number, b: number) => number): void => {
      const [a, b] = values.slice(n) as [number, number];
      values.splice(n, 2, Number.isNaN(a) ? b : Number.isNaN(b) ? a : of(a, b));
    };
    for (const [, { utilization, memory }] of this.#columns()) {
      join(utilization, (a, b) => a + (b - a) * share);
      join(memory, Math.max);
    }
    this.time.splice(n, 1);
  }

  /** All columns, each as long as the axis. */
  #columns(): [string, Column][] {
    return [...this.#gpus.keys()].map((uuid) => [uuid, this.column(uuid)]);
  }
}

/** Cell runs by GPU, oldest first; those of long ago are forgotten. */
export class Runs {
  #runs = new Map<string, CellRun>();
  #gpus = new Map<string, CellRun[]>();

  merge(cells: CellRun[], now: number): void {
    for (const cell of cells) this.#runs.set(cell.id, cell);
    this.#gpus.clear();
    // What ran before may be told after what runs now.
    const runs = [...this.#runs.values()].sort((a, b) => a.start - b.start);
    for (const run of runs) {
      if (run.end !== null && now - run.end > KEPT_S) this.#runs.delete(run.id);
      else
        for (const uuid of run.gpus) this.#gpus.set(uuid, [...(this.#gpus.get(uuid) ?? []), run]);
    }
  }

  /** Those that touched a GPU. */
  of(uuid: string): readonly CellRun[] {
    return this.#gpus.get(uuid) ?? [];
  }
}

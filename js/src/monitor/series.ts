/** Store the samples of each GPU over time, and the cells that ran. */

import type { CellRun, GpuSample, History, Snapshot } from '../snapshot.js';
import { holders } from './owners.js';

/** Samples stored; beyond this, the oldest quarter is dropped. */
const MOST = 1600;
/** Seconds for which cells are stored: the longest time that a chart shows. */
const CELLS_S = 3600;
/** A clock that goes back by more was set. */
const SET_BACK_S = 60;
/** Holders are not requested with each sample: a value is valid for so long. */
const LASTING_S = 10;
/** Prefix of the columns with the bytes of a holder. */
const HELD = '@';

/** The metrics of the charts. */
const READ = {
  utilization: (gpu: GpuSample) => gpu.utilization,
  memory: (gpu: GpuSample) => gpu.memory_used,
  power: (gpu: GpuSample) => gpu.power,
};
export type Metric = keyof typeof READ;
const METRICS = Object.keys(READ) as Metric[];

/** A cell's effect on one GPU; null if no sample was taken while it ran. */
interface Stats {
  peak: number | null;
  mean: number | null;
}

/** Whether samples are missing before sample n: the step is far longer than its neighbors. */
export function gap(time: readonly number[], n: number): boolean {
  const [a, b] = [time[n - 1], time[n]];
  if (a === undefined || b === undefined) return true;
  if (b - a < 5) return false;
  const usual = Math.max(a - (time[n - 2] ?? a), (time[n + 1] ?? b) - b);
  return b - a > 3 * usual;
}

/** Columns over a common time axis; NaN is "unknown". */
export class Series {
  time: number[] = [];
  /** Seconds; samples that arrive faster are merged. */
  step = 0;
  #gpus = new Map<string, Map<string, number[]>>();

  /** Return one GPU's values, one for each time. */
  values(uuid: string, metric: Metric): readonly number[] {
    return this.#long(this.#gpus.get(uuid)?.get(metric) ?? []);
  }

  /** Whether any value of a metric is known. */
  has(uuid: string, metric: Metric): boolean {
    return this.#gpus.get(uuid)?.has(metric) ?? false;
  }

  /** Return the holders of one GPU's memory, each with its bytes over time. */
  held(uuid: string): [string, readonly number[]][] {
    return [...(this.#gpus.get(uuid) ?? [])]
      .filter(([name]) => name.startsWith(HELD))
      .map(([name, values]) => [name.slice(HELD.length), this.#filled(this.#long(values))]);
  }

  /** Fill gaps with the last known value, for a while. */
  #filled(values: readonly number[]): number[] {
    let [last, at] = [Number.NaN, Number.NEGATIVE_INFINITY];
    return values.map((value, n) => {
      const time = this.time[n] as number;
      if (!Number.isNaN(value)) [last, at] = [value, time];
      return time - at <= LASTING_S ? last : Number.NaN;
    });
  }

  /** Add a snapshot, unless it is older than the last one. */
  push(snapshot: Snapshot): void {
    const last = this.time.at(-1) ?? Number.NEGATIVE_INFINITY;
    if (last - snapshot.time > SET_BACK_S) this.#keep(0, this.from(snapshot.time));
    else if (snapshot.time <= last) return;
    const held = holders(snapshot);
    for (const gpu of snapshot.gpus) {
      // The driver did not answer: its values are old.
      if (gpu.lost || gpu.age > 1) continue;
      for (const metric of METRICS) this.#push(gpu.uuid, metric, READ[metric](gpu));
      // No process at all means that holders were not requested.
      if (!snapshot.processes.length) continue;
      const now = held.get(gpu.uuid);
      for (const name of this.#gpus.get(gpu.uuid)?.keys() ?? [])
        if (name.startsWith(HELD) && !now?.has(name.slice(HELD.length)))
          this.#push(gpu.uuid, name, 0);
      for (const [holder, bytes] of now ?? []) this.#push(gpu.uuid, HELD + holder, bytes);
    }
    this.time.push(snapshot.time);
    const n = this.time.length - 1;
    if (snapshot.time - (this.time[n - 2] ?? 0) < this.step) this.#join(n - 1);
    if (n >= MOST) this.#keep(MOST / 4, n + 1);
  }

  /** Replace the samples of the history's time span by the history. */
  seed(history: History): void {
    const times = history.time;
    const [first, last] = [times[0], times.at(-1)];
    if (first === undefined || last === undefined) return;
    const old = this.time;
    const before = old.filter((time) => time < first).length;
    const after = old.filter((time) => time <= last).length;
    const was = new Map(old.map((time, n) => [time, n]));
    const past = new Map(
      Object.entries(history.gpus).map(([uuid, told]) => [uuid, columnsOf(told)]),
    );
    for (const [uuid, columns] of past) for (const name of columns.keys()) this.#column(uuid, name);
    for (const [uuid, columns] of this.#gpus)
      for (const [name, values] of columns) {
        this.#long(values);
        const column = past.get(uuid)?.get(name);
        // Keep known values of columns that the history lacks.
        const at = (n: number, time: number) => (column ? column[n] : values[was.get(time) ?? -1]);
        const found = times.map((time, n) => at(n, time) ?? Number.NaN);
        values.splice(before, after - before, ...found);
      }
    this.time = [...old.slice(0, before), ...times, ...old.slice(after)];
    this.#keep(Math.max(this.time.length - MOST, 0), this.time.length);
  }

  /** Return the index of the first sample at or after `time`. */
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

  /** Return the peak memory and mean utilization of one GPU over a time span. */
  stats(uuid: string, start: number, end: number): Stats {
    const [utilization, memory] = [this.values(uuid, 'utilization'), this.values(uuid, 'memory')];
    const [first, past] = [this.from(start), this.from(end + 1e-6)];
    const peaks = memory.slice(first, past).filter((value) => !Number.isNaN(value));
    let [sum, seconds] = [0, 0];
    for (let n = first; n <= past && n < this.time.length; n++) {
      // Utilization covers the time before its sample; the cell must fill half of it.
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

  #push(uuid: string, name: string, value: number | null): void {
    if (value !== null) this.#column(uuid, name).push(value);
  }

  #column(uuid: string, name: string): number[] {
    let columns = this.#gpus.get(uuid);
    if (!columns) {
      columns = new Map();
      this.#gpus.set(uuid, columns);
    }
    let values = columns.get(name);
    if (!values) {
      values = [];
      columns.set(name, values);
    }
    return this.#long(values);
  }

  /** Append NaN for the times when the GPU was absent. */
  #long(values: number[]): number[] {
    while (values.length < this.time.length) values.push(Number.NaN);
    return values;
  }

  #keep(first: number, past: number): void {
    for (const [uuid, columns] of this.#gpus) {
      for (const [name, values] of columns) {
        const kept = this.#long(values).slice(first, past);
        if (kept.every(Number.isNaN)) columns.delete(name);
        else columns.set(name, kept);
      }
      if (!columns.size) this.#gpus.delete(uuid);
    }
    this.time = this.time.slice(first, past);
  }

  /** Merge sample n and the next one: the peak of bytes, the mean of all else. */
  #join(n: number): void {
    const [before, a, b] = this.time.slice(n - 1) as [number, number, number];
    const share = (b - a) / (b - before);
    for (const columns of this.#gpus.values())
      for (const [name, values] of columns) {
        const [a, b] = this.#long(values).slice(n) as [number, number];
        const isBytes = name === 'memory' || name.startsWith(HELD);
        const both = isBytes ? Math.max(a, b) : a + (b - a) * share;
        values.splice(n, 2, Number.isNaN(a) ? b : Number.isNaN(b) ? a : both);
      }
    this.time.splice(n, 1);
  }
}

/** Return the columns of a history by the names used here. */
function columnsOf({ memory_used, held, ...rest }: History['gpus'][string]) {
  const holders = Object.entries(held).map(([name, values]) => [HELD + name, values] as const);
  return new Map([['memory', memory_used], ...Object.entries(rest), ...holders] as const);
}

/** Cell runs by GPU, oldest first. */
export class Runs {
  #runs = new Map<string, CellRun>();
  #gpus = new Map<string, CellRun[]>();

  merge(cells: CellRun[], now: number): void {
    for (const cell of cells) this.#runs.set(cell.id, cell);
    this.#gpus.clear();
    // Messages about earlier cells may arrive later.
    const runs = [...this.#runs.values()].sort((a, b) => a.start - b.start);
    for (const run of runs) {
      if (run.end !== null && now - run.end > CELLS_S) this.#runs.delete(run.id);
      else
        for (const uuid of run.gpus) {
          const there = this.#gpus.get(uuid);
          if (there) there.push(run);
          else this.#gpus.set(uuid, [run]);
        }
    }
  }

  /** Return the runs on a GPU. */
  of(uuid: string): readonly CellRun[] {
    return this.#gpus.get(uuid) ?? [];
  }

  /** Return the cell that a kernel is running. */
  running(kernel: string | null): CellRun | undefined {
    if (kernel === null) return undefined;
    return [...this.#runs.values()].find((run) => run.kernel === kernel && run.end === null);
  }
}

/** The past of each GPU, and the cells that ran in it. */

import type { CellRun, GpuSample, History, Snapshot } from '../snapshot.js';
import { heldBy } from './owners.js';

/** Samples kept; the oldest quarter goes when there are more. */
const KEPT = 1600;
/** Seconds for which cells are kept: the longest time that a chart shows. */
const KEPT_S = 3600;
/** A clock that went back by more than this was set. */
const SET_BACK_S = 60;
/** Who holds memory is taken to hold it for so long, where it is not asked at each sample. */
const LASTING_S = 10;
/** Before the name of a holder: so its column of bytes is called. */
const HELD = '@';

const sum = (a: number | null, b: number | null): number | null =>
  a === null && b === null ? null : (a ?? 0) + (b ?? 0);

/** What is charted, and how it is read. */
const READ = {
  utilization: (gpu: GpuSample) => gpu.utilization,
  memory: (gpu: GpuSample) => gpu.memory_used,
  pcie: (gpu: GpuSample) => sum(gpu.pcie_received, gpu.pcie_sent),
  nvlink: (gpu: GpuSample) => sum(gpu.nvlink_received, gpu.nvlink_sent),
  power: (gpu: GpuSample) => gpu.power,
};
export type Metric = keyof typeof READ;
export const METRICS = Object.keys(READ) as Metric[];

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

/** Columns over one axis of time; NaN is "not known". */
export class Series {
  time: number[] = [];
  /** Seconds; of samples that come faster, one is made. */
  step = 0;
  #gpus = new Map<string, Map<string, number[]>>();

  /** One GPU's values, as many as there are times. */
  values(uuid: string, metric: Metric): readonly number[] {
    return this.#long(this.#gpus.get(uuid)?.get(metric) ?? []);
  }

  /** Whether anything is known of a metric. */
  has(uuid: string, metric: Metric): boolean {
    return this.#gpus.get(uuid)?.has(metric) ?? false;
  }

  /** Who held one GPU's memory: each holder with its bytes over time. */
  held(uuid: string): [string, readonly number[]][] {
    return [...(this.#gpus.get(uuid) ?? [])]
      .filter(([name]) => name.startsWith(HELD))
      .map(([name, values]) => [name.slice(HELD.length), this.#filled(this.#long(values))]);
  }

  /** With what was known some seconds ago, where nobody asked since. */
  #filled(values: readonly number[]): number[] {
    let [last, at] = [Number.NaN, Number.NEGATIVE_INFINITY];
    return values.map((value, n) => {
      const time = this.time[n] as number;
      if (!Number.isNaN(value)) [last, at] = [value, time];
      return time - at <= LASTING_S ? last : Number.NaN;
    });
  }

  /** Adds a snapshot's values; what is not newer than the last adds nothing. */
  push(snapshot: Snapshot): void {
    const last = this.time.at(-1) ?? Number.NEGATIVE_INFINITY;
    if (last - snapshot.time > SET_BACK_S) this.#keep(0, this.from(snapshot.time));
    else if (snapshot.time <= last) return;
    const held = heldBy(snapshot);
    for (const gpu of snapshot.gpus) {
      // Values that the driver gave some time ago are not those of now.
      if (gpu.lost || gpu.age > 1) continue;
      for (const metric of METRICS) this.#push(gpu.uuid, metric, READ[metric](gpu) ?? null);
      // Without one process, nobody asked: it is not known, and not nothing.
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
    const was = new Map(old.map((time, n) => [time, n]));
    const past = new Map(Object.entries(history.gpus).map(([uuid, told]) => [uuid, pastOf(told)]));
    for (const [uuid, columns] of past) for (const name of columns.keys()) this.#column(uuid, name);
    for (const [uuid, columns] of this.#gpus)
      for (const [name, values] of columns) {
        this.#long(values);
        const told = past.get(uuid)?.get(name);
        // Of what the history does not tell, nothing that is known is forgotten.
        const at = (n: number, time: number) => (told ? told[n] : values[was.get(time) ?? -1]);
        const found = times.map((time, n) => at(n, time) ?? Number.NaN);
        values.splice(before, after - before, ...found);
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
    const [utilization, memory] = [this.values(uuid, 'utilization'), this.values(uuid, 'memory')];
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

  /** One that came late, or was away, has nothing to say of that time. */
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

  /** Makes one sample of number n and the next: the peak of bytes, the mean of all else. */
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

/** The columns of a history, by our names. */
function pastOf(told: History['gpus'][string]): Map<string, (number | null)[]> {
  const past = new Map<string, (number | null)[]>();
  const { memory_used: memory, held, ...rest } = told;
  past.set('memory', memory);
  for (const [metric, values] of Object.entries(rest)) past.set(metric, values);
  for (const [holder, values] of Object.entries(held ?? {})) past.set(HELD + holder, values);
  return past;
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

  /** What a kernel runs now. */
  running(kernel: string | null): CellRun | undefined {
    if (kernel === null) return undefined;
    return [...this.#runs.values()].find((run) => run.kernel === kernel && run.end === null);
  }
}

/** Store the samples of each GPU over time, and the cells that ran. */

import type { CellRun, GpuHistory, GpuSample, History, Snapshot } from '../snapshot.js';
import { holders, type Owner, ownerOf } from './owners.js';

/** Samples stored; beyond this, the oldest quarter is dropped. */
const MOST = 1600;
/** Seconds for which cells are stored: the longest time that a chart shows. */
const CELLS_S = 3600;
/** A clock that goes back by more was set. */
const SET_BACK_S = 60;
/** Holders are not requested with each sample: a value is valid for so long. */
const LASTING_S = 60;
/** Shorter steps are no gap. */
const STEP_S = 5;

/** The readings of one GPU that charts show; NaN is "unknown". */
interface Reading {
  utilization: number;
  memory: number;
  power: number;
  /** Bytes by holder; null if they were not requested. */
  held: Record<string, number> | null;
}
/** By UUID. */
type Readings = Map<string, Reading>;
export type Metric = 'utilization' | 'memory' | 'power';

/** A cell's effect on one GPU; null if no sample was taken while it ran. */
interface Stats {
  peak: number | null;
  mean: number | null;
}

/** Whether samples are missing before sample n: the step is far longer than its neighbors. */
export function gap(time: readonly number[], n: number): boolean {
  const [a, b] = [time[n - 1], time[n]];
  if (a === undefined || b === undefined) return true;
  if (b - a < STEP_S) return false;
  const usual = Math.max(a - (time[n - 2] ?? a), (time[n + 1] ?? b) - b);
  return b - a > 3 * usual;
}

export class Past {
  /** Seconds of Unix time, ascending. */
  readonly time: number[] = [];
  /** Seconds; samples that arrive faster are merged. */
  step = 0;
  /** One for each time. */
  readonly #readings: Readings[] = [];
  /** The oldest first. */
  #runs: CellRun[] = [];

  /** Return one GPU's values, one for each time. */
  values(uuid: string, metric: Metric): number[] {
    return this.#readings.map((gpus) => gpus.get(uuid)?.[metric] ?? Number.NaN);
  }

  /** Return the bytes of each owner on one GPU, one for each time. */
  parts(uuid: string, here: string | null): Map<Owner, number[]> {
    const parts = new Map<Owner, number[]>();
    let held: Reading['held'] = null;
    let known = 0;
    for (const [n, time] of this.time.entries()) {
      const now = this.#readings[n]?.get(uuid)?.held;
      if (now) [held, known] = [now, time];
      if (time - known > LASTING_S) continue;
      for (const [holder, bytes] of Object.entries(held ?? {})) {
        const owner = ownerOf(holder, here);
        const values = parts.get(owner) ?? new Array<number>(this.time.length).fill(0);
        parts.set(owner, values);
        values[n] = (values[n] ?? 0) + bytes;
      }
    }
    return parts;
  }

  /** Add a snapshot, unless it is older than the last one. */
  push(snapshot: Pick<Snapshot, 'time' | 'gpus' | 'processes'>): void {
    const { time } = snapshot;
    const last = this.time.at(-1) ?? Number.NEGATIVE_INFINITY;
    if (last - time > SET_BACK_S) this.#splice(this.from(time), Number.POSITIVE_INFINITY);
    else if (time <= last) return;
    this.#splice(this.time.length, 0, [time], [readings(snapshot)]);
    const before = this.time.at(-3) ?? Number.NEGATIVE_INFINITY;
    if (time - before < this.step) this.#merge(this.time.length - 2);
    if (this.time.length > MOST) this.#splice(0, MOST / 4);
  }

  /** Replace the samples of the history's time span by the history. */
  seed({ time, gpus }: History): void {
    const [first, last] = [time[0], time.at(-1)];
    if (first === undefined || last === undefined) return;
    const count = this.time.filter((one) => one >= first && one <= last).length;
    const past = time.map((_, n) => readingsAt(gpus, n));
    this.#splice(this.from(first), count, time, past);
    this.#splice(0, Math.max(this.time.length - MOST, 0));
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

  /** Return the index of the sample next to `time`; null in a gap. */
  nearest(time: number): number | null {
    const after = this.from(time);
    const to = (n: number): number => Math.abs((this.time[n] ?? Number.POSITIVE_INFINITY) - time);
    const n = to(after - 1) <= to(after) ? after - 1 : after;
    return to(n) <= STEP_S || !gap(this.time, after) ? n : null;
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
      peak: peaks.length ? Math.max(...peaks) : null,
      mean: seconds ? sum / seconds : null,
    };
  }

  /** Add cells; a message about a known one replaces it. */
  mark(cells: readonly CellRun[], now: number): void {
    const all = new Map([...this.#runs, ...cells].map((run) => [run.id, run]));
    // Messages about earlier cells may arrive later.
    this.#runs = [...all.values()]
      .filter(({ end }) => end === null || now - end <= CELLS_S)
      .sort((a, b) => a.start - b.start);
  }

  /** Return the runs on a GPU, the oldest first. */
  runs(uuid: string): CellRun[] {
    return this.#runs.filter(({ gpus }) => gpus.includes(uuid));
  }

  /** Return the cell that a kernel is running. */
  running(kernel: string | null): CellRun | undefined {
    return this.#runs.find((run) => run.kernel === kernel && kernel !== null && run.end === null);
  }

  #splice(start: number, count: number, time: number[] = [], readings: Readings[] = []): void {
    this.time.splice(start, count, ...time);
    this.#readings.splice(start, count, ...readings);
  }

  /** Merge sample n into the next one: the peak of memory, the mean of all else. */
  #merge(n: number): void {
    const [before, a, b] = this.time.slice(n - 1) as [number, number, number];
    const share = (b - a) / (b - before);
    const [old, next] = this.#readings.slice(n) as [Readings, Readings];
    const mean = (a: number, b: number): number => a + (b - a) * share;
    for (const [uuid, one] of old) {
      const two = next.get(uuid) ?? one;
      next.set(uuid, {
        utilization: both(one.utilization, two.utilization, mean),
        memory: both(one.memory, two.memory, Math.max),
        power: both(one.power, two.power, mean),
        held: two.held ?? one.held,
      });
    }
    this.#splice(n, 1);
  }
}

const orNaN = (value: number | null | undefined): number => value ?? Number.NaN;

function readings(snapshot: Pick<Snapshot, 'gpus' | 'processes'>): Readings {
  // No process at all means that they were not requested.
  const held = snapshot.processes.length ? holders(snapshot) : null;
  // If the driver did not answer, the values are old.
  const now = snapshot.gpus.filter(({ lost, age }) => !lost && age <= 1);
  const reading = (gpu: GpuSample): Reading => ({
    utilization: orNaN(gpu.utilization),
    memory: orNaN(gpu.memory_used),
    power: orNaN(gpu.power),
    held: held && (held.get(gpu.uuid) ?? {}),
  });
  return new Map(now.map((gpu) => [gpu.uuid, reading(gpu)]));
}

/** Return the readings of a history at its time n. */
function readingsAt(gpus: History['gpus'], n: number): Readings {
  const reading = ({ utilization, memory_used, power, held }: GpuHistory): Reading => {
    const all = Object.entries(held).map(([holder, bytes]) => [holder, bytes[n] ?? null]);
    const some = all.filter(([, bytes]) => bytes !== null);
    return {
      utilization: orNaN(utilization[n]),
      memory: orNaN(memory_used[n]),
      power: orNaN(power[n]),
      held: some.length ? Object.fromEntries(some) : null,
    };
  };
  return new Map(Object.entries(gpus).map(([uuid, past]) => [uuid, reading(past)]));
}

/** Combine two values; NaN is "unknown". */
const both = (a: number, b: number, combine: (a: number, b: number) => number): number =>
  Number.isNaN(a) ? b : Number.isNaN(b) ? a : combine(a, b);

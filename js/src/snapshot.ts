/** What the server and the kernel send: mirrors gpumagic/telemetry/snapshot.py. null is "not known". */

export interface Host {
  name: string | null;
  cpu_count: number | null;
  cpu_utilization: number | null;
  memory_total: number | null;
  memory_used: number | null;
  /** No other machine has the same; an older server does not say. */
  boot?: string | null;
}

export interface GpuSample {
  uuid: string;
  name: string | null;
  index: number | null;
  ordinal: number | null;
  ordinal_certain: boolean;
  virtual: boolean;
  mig: string | null;
  unified: boolean;
  memory_total: number | null;
  memory_used: number | null;
  memory_reserved: number | null;
  utilization: number | null;
  memory_utilization: number | null;
  temperature: number | null;
  temperature_limit: number | null;
  power: number | null;
  power_limit: number | null;
  sm_clock: number | null;
  memory_clock: number | null;
  throttle: string[] | null;
  sm_clock_limit: number | null;
  memory_clock_limit: number | null;
  fan: number | null;
  pcie_generation: number | null;
  pcie_width: number | null;
  pcie_generation_limit: number | null;
  pcie_width_limit: number | null;
  pcie_received: number | null;
  pcie_sent: number | null;
  nvlink_received: number | null;
  nvlink_sent: number | null;
  sm_activity: number | null;
  sm_occupancy: number | null;
  tensor_activity: number | null;
  dram_activity: number | null;
  ecc_corrected: number | null;
  ecc_uncorrected: number | null;
  xid: number | null;
  xid_time: number | null;
  energy: number | null;
  virtual_ordinal: number | null;
  lost: boolean;
  age: number;
  /** "nvidia", "amd", "intel", "apple"; an older server does not say, and has only NVIDIA's. */
  vendor?: string | null;
}

export interface ProcessSample {
  uuid: string;
  pid: number;
  memory: number | null;
  kind: string | null;
  name: string | null;
  user: string | null;
  notebook: string | null;
  started: number | null;
  mine: boolean;
  kernel: string | null;
  child: boolean;
  server: string | null;
  idle_since: number | null;
  orphan: boolean;
  ordinal: number | null;
  /** Bytes of RAM; an older server does not say. */
  host_memory?: number | null;
  /** Percent of the last seconds in which its kernels ran; an older server does not say. */
  utilization?: number | null;
  /** Of another host than the server's, which cannot end it. */
  elsewhere?: boolean;
}

export interface Problem {
  code: string;
  cause: string;
  cure: string;
  uuid: string | null;
}

export interface Snapshot {
  time: number;
  host: Host;
  driver: string | null;
  /** The newest CUDA that the driver can run: "13.0"; an older server does not say. */
  cuda?: string | null;
  /** What GPUs run on that are not NVIDIA's: "ROCm 6.2.4"; an older server does not say. */
  software?: string[];
  source: string;
  gpus: GpuSample[];
  processes: ProcessSample[];
  problems: Problem[];
}

/** A host that is not the server's, as a kernel there tells of it. */
export interface OtherHost {
  key: string;
  snapshot: Snapshot;
  /** Seconds for which it has not answered; 0 while it does. */
  silent: number;
}

/** Columns: the n-th value of each belongs to the n-th time. A GPU that was not there has null. */
export interface History {
  /** Seconds of Unix time, ascending. */
  time: number[];
  /** By UUID. */
  gpus: Record<string, Past>;
}

/** One GPU's columns; an older server has only the first two. */
export interface Past {
  utilization: (number | null)[];
  memory_used: (number | null)[];
  power?: (number | null)[];
  pcie?: (number | null)[];
  nvlink?: (number | null)[];
  /** Bytes by holder: "mine", "left", "others", or the kernel of a notebook. */
  held?: Record<string, (number | null)[]>;
}

/** A cell that ran, or runs (end is null). */
export interface CellRun {
  /** Unique and stable: the same run told again has the same id. */
  id: string;
  kernel: string | null;
  notebook: string | null;
  /** The number in brackets before the cell. */
  count: number | null;
  start: number;
  end: number | null;
  /** UUIDs of the GPUs on which its kernel held memory. */
  gpus: string[];
}

/** One line of the doctor; ok is null where it is neither right nor wrong. */
export interface Check {
  name: string;
  ok: boolean | null;
  found: string;
  cure: string;
}

/** One device in a measurement that runs. */
export interface TimingBar {
  /** "cuda:0", "cpu", or "cuda:0+cuda:1" for both at once. */
  where: string;
  /** Its median so far, out of the slowest; 0 where there is none. */
  share: number;
  /** The same in words, or how far it is. */
  text: string;
}

/** How far a measurement is; nothing of it where none runs. */
export interface Timing {
  line?: string;
  bars?: TimingBar[];
}

/** A result that brings its own text and HTML, such as a timing comparison. */
export interface Result {
  id: string;
  title: string;
  time: number;
  text: string;
  html: string | null;
}

/** What of this notebook holds a GPU's memory, the most first. */
export interface Holding {
  /** What one would type to reach it. */
  name: string;
  kind: string;
  nbytes: number;
  /** "In [3], line 5"; empty where it is not known. */
  made: string;
  aliases: string[];
}

export interface GpuHoldings {
  allocated: number | null;
  rows: Holding[];
  /** How many smaller ones there are, and their bytes. */
  more: number;
  left: number;
}

/** As of when somebody asked: mirrors gpumagic/widget/notebook_watch.py. */
export interface Holdings {
  /** The number of the cell that ran last. */
  cell: number;
  /** How long the kernel took to find out. */
  seconds: number;
  /** By UUID. */
  gpus: Record<string, GpuHoldings>;
}

/** What takes the kernel so many seconds is not asked for again after each cell. */
export const TOO_LONG_S = 0.5;

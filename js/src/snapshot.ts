/** Declare the records that the server and the kernel send; null is "unknown". */

export interface Host {
  name: string | null;
  cpu_count: number | null;
  cpu_utilization: number | null;
  memory_total: number | null;
  memory_used: number | null;
  /** Unique to this boot of this machine. */
  boot: string | null;
  /** The RAM limit of its container, and the bytes that count against it. */
  memory_limit: number | null;
  limit_used: number | null;
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
  fan: number | null;
  pcie_generation: number | null;
  pcie_width: number | null;
  pcie_generation_limit: number | null;
  pcie_width_limit: number | null;
  ecc_corrected: number | null;
  ecc_uncorrected: number | null;
  virtual_ordinal: number | null;
  xid: number | null;
  xid_time: number | null;
  lost: boolean;
  age: number;
  /** "nvidia", "amd", "intel" or "apple". */
  vendor: string | null;
}

export interface ProcessSample {
  uuid: string;
  pid: number;
  memory: number | null;
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
  /** Bytes of RAM, of a kernel without a GPU. */
  host_memory?: number | null;
  /** Percent of the last seconds in which its CUDA kernels ran. */
  utilization: number | null;
  /** Whether it runs on another host than the server; the server cannot end it. */
  elsewhere?: boolean;
}

/** A kernel of the server, with its child processes. */
export interface KernelSample {
  kernel: string;
  pid: number;
  notebook: string | null;
  idle_since: number | null;
  /** Percent of one core. */
  cpu: number | null;
  host_memory: number | null;
  /** Bytes of RAM per second. */
  growth: number | null;
}

/** A cell of a notebook; `code` is the beginning of its source. */
export interface Place {
  kernel: string | null;
  notebook: string | null;
  count: number | null;
  code?: string | null;
}

/** A kernel that ended, and nobody asked it to. */
export interface KernelDeath extends Place {
  id: string;
  time: number;
  code: string | null;
  title: string;
  details: string[];
  advice: string;
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
  /** The newest CUDA version that the driver supports: "13.0". */
  cuda: string | null;
  /** Driver software of other vendors: "ROCm 6.2.4". */
  software: string[];
  gpus: GpuSample[];
  processes: ProcessSample[];
  problems: Problem[];
  /** Of the server that took the snapshot. */
  kernels: KernelSample[];
  /** The oldest first. */
  events: KernelDeath[];
}

/** A host other than the server's, as reported by a kernel. */
export interface OtherHost {
  key: string;
  snapshot: Snapshot;
  /** Seconds since its last answer; 0 while it answers. */
  silent: number;
}

/** Columns of samples: value n belongs to time n. */
export interface History {
  /** Seconds of Unix time, ascending. */
  time: number[];
  /** By UUID. */
  gpus: Record<string, GpuHistory>;
}

/** The columns of one GPU. */
export interface GpuHistory {
  utilization: (number | null)[];
  memory_used: (number | null)[];
  power: (number | null)[];
  /** Bytes by holder: "mine", "left", "others", or a kernel's id. */
  held: Record<string, (number | null)[]>;
}

/** A cell that ran, or is running (end is null). */
export interface CellRun extends Place {
  /** The same for each message about the same run. */
  id: string;
  start: number;
  end: number | null;
  /** UUIDs of the GPUs on which its kernel held memory. */
  gpus: string[];
}

/** A message from the server's stream. */
export type Message =
  | { type: 'snapshot'; snapshot: Snapshot }
  | { type: 'history'; history: History; cells: CellRun[] }
  | { type: 'cells'; cells: CellRun[] };

/** What a page requests from the stream. */
export interface Want {
  /** Seconds between snapshots. */
  period: number;
  /** Whether to include processes, the most expensive part. */
  processes?: boolean;
  /** Whether to send the history and the cells that ran. */
  history?: boolean;
}

/** One check of the doctor; ok is null if it is only information. */
export interface Check {
  name: string;
  ok: boolean | null;
  found: string;
  cure: string;
}

/** The bar of one device in a measurement. */
export interface TimingBar {
  /** "cuda:0", "cpu", or "cuda:0+cuda:1" for both at once. */
  where: string;
  /** Its median divided by the slowest one; 0 if there is none yet. */
  share: number;
  /** The median, or the progress, in words. */
  text: string;
}

/** The progress of a running measurement; empty if none is running. */
export interface Timing {
  line?: string;
  bars?: TimingBar[];
}

/** A result, such as a timing comparison. */
export interface Result {
  id: string;
  title: string;
  time: number;
  text: string;
  bars: TimingBar[];
}

/** A variable of the notebook that holds memory on a GPU. */
export interface Variable {
  /** The expression that reaches it. */
  name: string;
  kind: string;
  nbytes: number;
  /** "In [3], line 5"; empty if unknown. */
  made: string;
  aliases: string[];
}

export interface GpuVariables {
  allocated: number | null;
  /** The largest first. */
  rows: Variable[];
  /** The number of smaller ones that are not listed, and their bytes. */
  more: number;
  left: number;
}

/** The notebook's variables on each GPU; mirrors gpumagic/widget/notebook_watch.py. */
export interface Variables {
  /** The number of the last cell that ran. */
  cell: number;
  /** How long the kernel took to find out. */
  seconds: number;
  /** By UUID. */
  gpus: Record<string, GpuVariables>;
}

/** From this many seconds on, the kernel is asked only on request and not after each cell. */
export const SLOW_S = 0.2;

/** Keep the listeners of the stream, what they want together, and the messages they get. */

import type {
  CellRun,
  Check,
  GpuSample,
  History,
  Problem,
  ProcessSample,
  Snapshot,
} from '../snapshot.js';

export interface Connection {
  kind: 'live' | 'connecting' | 'polling' | 'standby' | 'lost';
  text?: string;
}

export interface Listener {
  snapshot?(snapshot: Snapshot): void;
  history?(history: History): void;
  cells?(cells: CellRun[]): void;
  connection?(connection: Connection): void;
}

export interface Want {
  /** Seconds between snapshots. */
  period: number;
  /** Who holds memory too: the most expensive question. */
  processes?: boolean;
  /** The past, and the cells that ran. */
  history?: boolean;
}

export interface Subscription {
  change(want: Want | null): void;
  close(): void;
}

/** Listeners and their wants; one without a want hears what others make come. */
export class Audience {
  #wants = new Map<Listener, Want | null>();
  #changed: () => void;

  constructor(changed: () => void) {
    this.#changed = changed;
  }

  add(listener: Listener, want: Want | null): Subscription {
    this.#wants.set(listener, want);
    this.#changed();
    return {
      change: (next) => {
        if (!this.#wants.has(listener)) return;
        this.#wants.set(listener, next);
        this.#changed();
      },
      close: () => {
        if (this.#wants.delete(listener)) this.#changed();
      },
    };
  }

  clear(): void {
    this.#wants.clear();
    this.#changed();
  }

  /** The fastest period, and all that any of them wants; null where nobody wants anything. */
  want(): Want | null {
    const wants = [...this.#wants.values()].filter((want) => want !== null);
    if (wants.length === 0) return null;
    return {
      period: Math.min(...wants.map((want) => want.period)),
      processes: wants.some((want) => want.processes),
      history: wants.some((want) => want.history),
    };
  }

  tell(what: (listener: Listener) => void): void {
    for (const listener of [...this.#wants.keys()]) what(listener);
  }
}

export type Message =
  | { type: 'snapshot'; snapshot: Snapshot }
  | { type: 'history'; history: History; cells: CellRun[] }
  | { type: 'cells'; cells: CellRun[] };

type Fields = Record<string, unknown>;

const isFields = (value: unknown): value is Fields =>
  typeof value === 'object' && value !== null && !Array.isArray(value);

/** The items that have these fields, of these types. */
function items<T>(value: unknown, types: Record<string, string>): T[] {
  if (!Array.isArray(value)) return [];
  const wanted = Object.entries(types);
  return value.filter(
    (item) => isFields(item) && wanted.every(([name, type]) => typeof item[name] === type),
  ) as T[];
}

export function toSnapshot(value: unknown): Snapshot | null {
  if (!isFields(value) || typeof value.time !== 'number' || !Array.isArray(value.gpus)) return null;
  return {
    time: value.time,
    host: (isFields(value.host) ? value.host : {}) as unknown as Snapshot['host'],
    driver: typeof value.driver === 'string' ? value.driver : null,
    cuda: typeof value.cuda === 'string' ? value.cuda : null,
    software: Array.isArray(value.software) ? value.software.map(String) : [],
    source: String(value.source),
    gpus: items<GpuSample>(value.gpus, { uuid: 'string' }).map((gpu) =>
      gpu.throttle && !Array.isArray(gpu.throttle) ? { ...gpu, throttle: null } : gpu,
    ),
    processes: items<ProcessSample>(value.processes, { uuid: 'string', pid: 'number' }),
    problems: items<Problem>(value.problems, { code: 'string', cause: 'string', cure: 'string' }),
  };
}

/** The hosts of a kernel's ranks, with the processes of these; null where there are none. */
export function toRankHosts(value: unknown): { pids: number[]; snapshot: Snapshot }[] | null {
  if (!Array.isArray(value)) return null;
  return value.filter(isFields).flatMap(({ pids, snapshot: told }) => {
    const snapshot = toSnapshot(told);
    const numbers = (Array.isArray(pids) ? pids : []).filter((pid) => typeof pid === 'number');
    return snapshot ? [{ pids: numbers, snapshot }] : [];
  });
}

export function toHistory(value: unknown): History | null {
  if (!isFields(value) || !Array.isArray(value.time) || !isFields(value.gpus)) return null;
  const length = value.time.length;
  const isColumn = (column: unknown) => Array.isArray(column) && column.length === length;
  const gpus = Object.entries(value.gpus).filter(
    ([, columns]) =>
      isFields(columns) && isColumn(columns.utilization) && isColumn(columns.memory_used),
  );
  return { time: value.time, gpus: Object.fromEntries(gpus) } as History;
}

export const toCells = (value: unknown): CellRun[] =>
  items<CellRun>(value, { id: 'string', start: 'number', gpus: 'object' }).filter((run) =>
    Array.isArray(run.gpus),
  );

/** What the doctor found. */
export function toChecks(value: unknown): Check[] {
  const checks = isFields(value) ? value.checks : value;
  return items<Check>(checks, { name: 'string', found: 'string', cure: 'string' });
}

/** A message from the stream; null where it is not JSON, or of a kind that this version lacks. */
export function parse(text: unknown): Message | null {
  let value: unknown;
  try {
    value = JSON.parse(String(text));
  } catch {
    return null;
  }
  if (!isFields(value)) return null;
  if (value.type === 'snapshot') {
    const snapshot = toSnapshot(value.snapshot);
    return snapshot && { type: 'snapshot', snapshot };
  }
  if (value.type === 'history') return toPast(value);
  return value.type === 'cells' ? { type: 'cells', cells: toCells(value.cells) } : null;
}

/** The history and the cells that ran in it. */
export function toPast(value: unknown): (Message & { type: 'history' }) | null {
  if (!isFields(value)) return null;
  const history = toHistory(value.history);
  return history && { type: 'history', history, cells: toCells(value.cells) };
}

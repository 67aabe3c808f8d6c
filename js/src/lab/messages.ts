/** What the server says, checked before anything else sees it; what is not understood is null. */

import type {
  CellRun,
  Check,
  GpuSample,
  History,
  Problem,
  ProcessSample,
  Snapshot,
} from '../snapshot.js';

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

/** Replace the server and the browser for the stream; time passes when a test says so. */

import schema from '../../schema/plugin.json';
import type { Limits } from '../src/lab/alerts.js';
import { read, type Values } from '../src/lab/settings.js';
import type { Environment, Listener, Socket } from '../src/lab/stream.js';
import type { Connection } from '../src/monitor/shared.js';
import type { CellRun, History, Snapshot } from '../src/snapshot.js';

export class FakeSocket implements Socket {
  readyState = 0 as WebSocket['readyState'];
  onopen: Socket['onopen'] = null;
  onmessage: Socket['onmessage'] = null;
  onclose: Socket['onclose'] = null;
  sent: Record<string, unknown>[] = [];

  send(data: unknown): void {
    this.sent.push(JSON.parse(String(data)));
  }

  close(): void {
    this.cut();
  }

  open(): void {
    this.readyState = 1;
    this.onopen?.call(this as unknown as WebSocket, new Event('open'));
  }

  say(message: unknown): void {
    const data = typeof message === 'string' ? message : JSON.stringify(message);
    this.onmessage?.call(this as unknown as WebSocket, new MessageEvent('message', { data }));
  }

  /** The server or a proxy closes it. */
  cut(): void {
    if (this.readyState === 3) return;
    this.readyState = 3;
    this.onclose?.call(this as unknown as WebSocket, new CloseEvent('close'));
  }
}

export class FakeEnvironment implements Environment {
  sockets: FakeSocket[] = [];
  asked: string[] = [];
  /** The answer to a request; an error is thrown. */
  answer: (path: string) => unknown = () => new Error('down');
  isHidden = false;
  chance = 1;
  #now = 0;
  #timers: { at: number; then: () => void }[] = [];
  #changed = () => {};

  get last(): FakeSocket {
    const socket = this.sockets.at(-1);
    if (!socket) throw new Error('no socket was opened');
    return socket;
  }

  get timers(): number {
    return this.#timers.length;
  }

  socket(): FakeSocket {
    const socket = new FakeSocket();
    this.sockets.push(socket);
    return socket;
  }

  async get<T>(path: string): Promise<T> {
    this.asked.push(path);
    const answer = this.answer(path);
    if (answer instanceof Error) throw answer;
    return answer as T;
  }

  hidden = () => this.isHidden;

  watch(changed: () => void): void {
    this.#changed = changed;
  }

  hide(hidden: boolean): void {
    this.isHidden = hidden;
    this.#changed();
  }

  after(milliseconds: number, then: () => void): () => void {
    const timer = { at: this.#now + milliseconds, then };
    this.#timers.push(timer);
    return () => {
      this.#timers = this.#timers.filter((one) => one !== timer);
    };
  }

  now = () => this.#now;
  random = () => this.chance;

  /** Let time pass, and run the timers in their order. */
  async pass(milliseconds: number): Promise<void> {
    const end = this.#now + milliseconds;
    for (;;) {
      await settled();
      const next = this.#timers.filter((one) => one.at <= end).sort((a, b) => a.at - b.at)[0];
      if (!next) break;
      this.#timers = this.#timers.filter((one) => one !== next);
      this.#now = Math.max(this.#now, next.at);
      next.then();
    }
    this.#now = end;
  }
}

/** The settings of a user who changed none. */
export const DEFAULTS = Object.fromEntries(
  Object.entries(schema.properties).map(([key, property]) => [key, property.default]),
) as unknown as Values;

export const limits = (changes: Partial<Values> = {}): Limits =>
  read({ ...DEFAULTS, ...changes }).limits;

/** Wait until pending promises are settled. */
export async function settled(): Promise<void> {
  for (let n = 0; n < 20; n++) await Promise.resolve();
}

export function snapshot(time: number, changes: Partial<Snapshot> = {}): Snapshot {
  const host = {
    name: 'box',
    cpu_count: 8,
    cpu_utilization: 1,
    memory_total: 2 ** 36,
    memory_used: 2 ** 30,
    boot: null,
    memory_limit: null,
    limit_used: null,
  };
  return {
    time,
    host,
    driver: null,
    cuda: null,
    software: [],
    gpus: [],
    processes: [],
    problems: [],
    kernels: [],
    events: [],
    ...changes,
  };
}

/** A listener that records its calls. */
export class Recorder implements Required<Listener> {
  snapshots: number[] = [];
  histories: number[][] = [];
  runs: string[] = [];
  states: string[] = [];
  text: string | undefined;

  snapshot = ({ time }: Snapshot) => void this.snapshots.push(time);
  history = ({ time }: History) => void this.histories.push(time);
  cells = (cells: CellRun[]) => void this.runs.push(...cells.map((run) => run.id));
  connection = ({ kind, text }: Connection) => {
    this.states.push(kind);
    this.text = text;
  };
}

/**
 * Ask kernels on other hosts for the GPUs there.
 *
 * Such kernels run behind a gateway, a provisioner or SSH. A kernel is asked over the connection of
 * its notebook or console in this page. A connection of our own would keep an idle kernel from
 * being culled, and would receive the output that the server buffers for a broken connection.
 */

import type { Kernel, KernelMessage } from '@jupyterlab/services';
import type { Host, OtherHost, ProcessSample, Snapshot } from '../snapshot.js';
import type { ask } from './current-kernel.js';
import type { Environment } from './stream.js';

/** After so many seconds without an answer a host is shown as silent, and then it is removed. */
const SILENT_S = 3;
const GONE_S = 30;
/** gpumagic/magics/control_channel.py opens a comm of this name, and answers these requests. */
const TARGET = 'gpumagic';
const REQUEST = 'gpumagic_request';

/** State of one kernel. */
interface Known {
  /** Not asked yet; without gpumagic; on the server's host; on another host. */
  is: 'new' | 'without' | 'near' | 'far';
  asking: boolean;
  /** It did not answer the last request. */
  failed: boolean;
  pid: number | null;
  host: string;
}

/** State of one host. */
interface Seen {
  snapshot: Snapshot;
  /** The time of the first request since its last answer, in seconds. */
  waiting: number | null;
}

const unknown = (): Known => ({ is: 'new', asking: false, failed: false, pid: null, host: '' });

const keyOf = ({ name, boot }: Host): string => `${name} ${boot ?? ''}`;

export class Hosts {
  #environment: Pick<Environment, 'now' | 'after'>;
  #connections: () => Iterable<Kernel.IKernelConnection>;
  #names: () => ReadonlyMap<string, string>;
  #show: (hosts: OtherHost[]) => void;
  #send: typeof ask;
  #kernels = new Map<Kernel.IKernelConnection, Known>();
  #hosts = new Map<string, Seen>();
  #own: Snapshot | null = null;

  /** `connections` of this page; `names` of the notebooks of all kernels, by the kernel's id. */
  constructor(
    environment: Pick<Environment, 'now' | 'after'>,
    connections: () => Iterable<Kernel.IKernelConnection>,
    names: () => ReadonlyMap<string, string>,
    show: (hosts: OtherHost[]) => void,
    send: typeof ask,
  ) {
    [this.#environment, this.#connections, this.#names] = [environment, connections, names];
    [this.#show, this.#send] = [show, send];
  }

  get #now(): number {
    return this.#environment.now() / 1000;
  }

  /** Ask new kernels, and one on each host; `own` is the server's host. */
  poll(own: Snapshot): void {
    this.#own = own;
    // Two notebooks can share a kernel.
    const kernels = new Map([...this.#connections()].map((kernel) => [kernel.id, kernel]));
    this.#follow(new Set(kernels.values()));
    this.#expire();
    for (const host of this.#hosts.values()) host.waiting ??= this.#now;
    for (const [kernel, known] of this.#kernels)
      if (known.is === 'new' && canAsk(kernel, known)) void this.#probe(kernel, known);
    for (const key of this.#hosts.keys()) {
      const there = [...this.#kernels].filter((one) => one[1].host === key && canAsk(...one));
      const first = there.find(([, { failed }]) => !failed) ?? there[0];
      if (first) void this.#ask(...first);
    }
    this.#update();
  }

  /** Remove hosts that have been silent for long, or have no kernel any more. */
  #expire(): void {
    for (const [key, { waiting }] of this.#hosts) {
      const there = [...this.#kernels.values()].filter((known) => known.host === key);
      if (there.length && this.#now - (waiting ?? this.#now) < GONE_S) continue;
      this.#hosts.delete(key);
      for (const known of there) Object.assign(known, { is: 'without', host: '' });
    }
  }

  /** Connect to the signals of new kernels, and disconnect from closed ones. */
  #follow(kernels: ReadonlySet<Kernel.IKernelConnection>): void {
    for (const kernel of this.#kernels.keys()) {
      if (kernels.has(kernel)) continue;
      kernel.statusChanged.disconnect(this.#onStatus);
      kernel.connectionStatusChanged.disconnect(this.#onConnection);
      kernel.iopubMessage.disconnect(this.#onMessage);
      this.#kernels.delete(kernel);
    }
    for (const kernel of kernels) {
      if (this.#kernels.has(kernel)) continue;
      kernel.statusChanged.connect(this.#onStatus);
      kernel.connectionStatusChanged.connect(this.#onConnection);
      kernel.iopubMessage.connect(this.#onMessage);
      this.#kernels.set(kernel, unknown());
    }
  }

  #onStatus = (kernel: Kernel.IKernelConnection, status: Kernel.Status): void => {
    const known = this.#kernels.get(kernel);
    if (known && status.endsWith('restarting')) Object.assign(known, unknown());
  };

  /** A broken connection may have lost the last answer. */
  #onConnection = (kernel: Kernel.IKernelConnection, status: Kernel.ConnectionStatus): void => {
    if (status === 'connected') this.#askAgain(kernel);
  };

  /** A cell may load gpumagic, when it starts or when it ends. */
  #onMessage = (kernel: Kernel.IKernelConnection, message: KernelMessage.IIOPubMessage): void => {
    const { header, parent_header: parent } = message;
    const ran = 'msg_type' in parent && parent.msg_type === 'execute_request';
    if (ran && ['execute_input', 'status'].includes(header.msg_type)) this.#askAgain(kernel);
  };

  #askAgain(kernel: Kernel.IKernelConnection): void {
    const known = this.#kernels.get(kernel);
    if (known?.is === 'without') known.is = 'new';
  }

  /** Find out whether a kernel has gpumagic, and where it runs. */
  async #probe(kernel: Kernel.IKernelConnection, known: Known): Promise<void> {
    known.asking = true;
    const info = await kernel.info.catch(() => null);
    const python = info?.language_info.name === 'python';
    const content = { target_name: TARGET };
    const answer =
      python && (await this.#send(kernel, 'comm_info_request', content, this.#environment));
    known.asking = false;
    known.is = answer && Object.keys(answer.comms ?? {}).length > 0 ? 'far' : 'without';
    if (known.is === 'far') await this.#ask(kernel, known);
  }

  /** Ask a kernel about its host. */
  async #ask(kernel: Kernel.IKernelConnection, known: Known): Promise<void> {
    known.asking = true;
    const answer = await this.#send(kernel, REQUEST, {}, this.#environment);
    known.asking = false;
    const snapshot = answer?.snapshot;
    known.failed = !snapshot;
    if (!snapshot || this.#kernels.get(kernel) !== known) {
      if (!known.host) known.is = 'without';
      return;
    }
    const key = keyOf(snapshot.host);
    if (this.#own && key === keyOf(this.#own.host)) known.is = 'near';
    else {
      Object.assign(known, { host: key, pid: answer?.pid ?? null });
      this.#hosts.set(key, { snapshot: this.#named(snapshot, key), waiting: null });
    }
    this.#update();
  }

  /** Add this server's notebooks, which the other host may not know. */
  #named(snapshot: Snapshot, host: string): Snapshot {
    const names = this.#names();
    // The other host may use its own ids for the kernels, and for their workers.
    const here = [...this.#kernels].filter(([, known]) => known.host === host);
    const pids = new Map(here.map(([{ id }, { pid }]) => [pid, id]));
    const mains = snapshot.processes.filter(({ pid }) => pids.has(pid));
    const ids = new Map(mains.map(({ kernel, pid }) => [kernel, pids.get(pid)]));
    const processes = snapshot.processes.map((process): ProcessSample => {
      const { pid, kernel } = process;
      const isOurs = kernel !== null && names.has(kernel);
      const id = pids.get(pid) ?? (kernel && ids.get(kernel)) ?? (isOurs ? kernel : null);
      const notebook = names.get(id ?? '') ?? process.notebook;
      return { ...process, kernel: id, notebook, mine: false, server: null, elsewhere: true };
    });
    return { ...snapshot, processes };
  }

  /** Show each GPU once: a container can have another name than the server, but the same GPUs. */
  #update(): void {
    const seen = new Set(this.#own?.gpus.map(({ uuid }) => uuid));
    const shown: OtherHost[] = [];
    for (const [key, { snapshot, waiting }] of this.#hosts) {
      const gpus = snapshot.gpus.filter(({ uuid }) => !seen.has(uuid));
      if (snapshot.gpus.length && !gpus.length) continue;
      const uuids = new Set(gpus.map(({ uuid }) => uuid));
      for (const uuid of uuids) seen.add(uuid);
      const processes = snapshot.processes.filter(({ uuid }) => uuids.has(uuid));
      const old = this.#now - (waiting ?? this.#now);
      const silent = old >= SILENT_S ? old : 0;
      const aged = gpus.map((gpu) => ({ ...gpu, age: Math.max(gpu.age, silent) }));
      shown.push({ key, silent, snapshot: { ...snapshot, gpus: aged, processes } });
    }
    this.#show(shown);
  }
}

/** Whether a request would be sent now: a broken connection would send it later. */
function canAsk(kernel: Kernel.IKernelConnection, known: Known): boolean {
  const runs = kernel.status === 'idle' || kernel.status === 'busy';
  return !known.asking && kernel.connectionStatus === 'connected' && runs;
}

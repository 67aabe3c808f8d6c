/**
 * Ask kernels on other hosts for the GPUs there.
 *
 * Such kernels run behind a gateway, a provisioner or SSH. A kernel is asked over the connection of
 * its notebook or console in this page. A connection of our own would keep an idle kernel from
 * being culled, and would receive the output that the server buffers for a broken connection.
 */

import type { Kernel, KernelMessage } from '@jupyterlab/services';
import type { Host, OtherHost, Snapshot } from '../snapshot.js';
import type { ask } from './current-kernel.js';
import type { World } from './stream.js';

/** After so many seconds without an answer a host is shown as silent, and then it is removed. */
const SILENT_S = 3;
const GONE_S = 30;
/** Longer gaps between two requests count as this long: nobody asked. */
const LONGEST_S = 10;
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
  /** It was asked, and has not answered since. */
  asked: boolean;
  silent: number;
}

const unknown = (): Known => ({ is: 'new', asking: false, failed: false, pid: null, host: '' });

const keyOf = ({ name, boot }: Host): string => `${name} ${boot ?? ''}`;

export class Hosts {
  #world: Pick<World, 'now' | 'after'>;
  #connections: () => Iterable<Kernel.IKernelConnection>;
  #names: () => ReadonlyMap<string, string>;
  #show: (hosts: OtherHost[]) => void;
  #send: typeof ask;
  #known = new Map<Kernel.IKernelConnection, Known>();
  #hosts = new Map<string, Seen>();
  #own: Snapshot | null = null;
  #here: string | null = null;
  #lookedAt = 0;
  #any = false;

  /** `connections` of this page; `names` of the notebooks of all kernels, by the kernel's id. */
  constructor(
    world: Pick<World, 'now' | 'after'>,
    connections: () => Iterable<Kernel.IKernelConnection>,
    names: () => ReadonlyMap<string, string>,
    show: (hosts: OtherHost[]) => void,
    send: typeof ask,
  ) {
    [this.#world, this.#connections, this.#names] = [world, connections, names];
    [this.#show, this.#send] = [show, send];
  }

  /** Change the current notebook's kernel, which is asked first. */
  here(kernel: string | null): void {
    this.#here = kernel;
  }

  /** Ask the kernels; `own` is the server's host. */
  look(own: Snapshot): void {
    this.#own = own;
    // Two notebooks can share a kernel.
    const kernels = new Map([...this.#connections()].map((kernel) => [kernel.id, kernel]));
    this.#follow(new Set(kernels.values()));
    this.#expire();
    const reporters = new Set([...this.#hosts.keys()].map((key) => this.#reporter(key)));
    for (const host of this.#hosts.values()) host.asked = true;
    for (const [kernel, known] of this.#known) {
      if (known.is === 'without' || !canAsk(kernel, known)) continue;
      if (known.is === 'new') void this.#probe(kernel, known);
      else if (reporters.has(known)) void this.#ask(kernel, known);
    }
    this.#update();
  }

  /** Remove hosts that have been silent for long, or have no kernel any more. */
  #expire(): void {
    const now = this.#world.now() / 1000;
    const gap = Math.min(now - this.#lookedAt, LONGEST_S);
    this.#lookedAt = now;
    for (const [key, host] of this.#hosts) {
      const there = [...this.#known.values()].filter((known) => known.host === key);
      if (host.asked) host.silent += gap;
      if (there.length && host.silent < GONE_S) continue;
      this.#hosts.delete(key);
      for (const known of there) known.is = 'without';
    }
  }

  /** Connect to the signals of new kernels, and disconnect from closed ones. */
  #follow(kernels: ReadonlySet<Kernel.IKernelConnection>): void {
    for (const kernel of this.#known.keys()) {
      if (kernels.has(kernel)) continue;
      kernel.statusChanged.disconnect(this.#onStatus);
      kernel.connectionStatusChanged.disconnect(this.#onConnection);
      kernel.iopubMessage.disconnect(this.#onMessage);
      this.#known.delete(kernel);
    }
    for (const kernel of kernels) {
      if (this.#known.has(kernel)) continue;
      kernel.statusChanged.connect(this.#onStatus);
      kernel.connectionStatusChanged.connect(this.#onConnection);
      kernel.iopubMessage.connect(this.#onMessage);
      this.#known.set(kernel, unknown());
    }
  }

  #onStatus = (kernel: Kernel.IKernelConnection, status: Kernel.Status): void => {
    const known = this.#known.get(kernel);
    if (known && status.endsWith('restarting')) Object.assign(known, unknown());
  };

  /** A broken connection may have lost the last answer. */
  #onConnection = (kernel: Kernel.IKernelConnection, status: Kernel.ConnectionStatus): void => {
    const known = this.#known.get(kernel);
    if (known?.is === 'without' && status === 'connected') known.is = 'new';
  };

  /** A cell may load gpumagic, when it starts or when it ends. */
  #onMessage = (kernel: Kernel.IKernelConnection, message: KernelMessage.IIOPubMessage): void => {
    const known = this.#known.get(kernel);
    const { header, parent_header: parent } = message;
    const ran = 'msg_type' in parent && parent.msg_type === 'execute_request';
    if (!ran || !['execute_input', 'status'].includes(header.msg_type)) return;
    if (known?.is === 'without') known.is = 'new';
  };

  /** Return the kernel to ask about a host: the current notebook's, or any that answers. */
  #reporter(host: string): Known | undefined {
    const rank = ([kernel, { failed }]: [Kernel.IKernelConnection, Known]) =>
      Number(failed) * 2 + Number(kernel.id !== this.#here);
    return [...this.#known]
      .filter(([kernel, known]) => known.host === host && canAsk(kernel, known))
      .sort((a, b) => rank(a) - rank(b))[0]?.[1];
  }

  /** Find out whether a kernel has gpumagic, and where it runs. */
  async #probe(kernel: Kernel.IKernelConnection, known: Known): Promise<void> {
    known.asking = true;
    const info = await kernel.info.catch(() => null);
    const python = info?.language_info.name === 'python';
    const content = { target_name: TARGET };
    const answer = python && (await this.#send(kernel, 'comm_info_request', content, this.#world));
    known.asking = false;
    known.is = answer && Object.keys(answer.comms ?? {}).length > 0 ? 'far' : 'without';
    if (known.is === 'far') await this.#ask(kernel, known);
  }

  /** Ask a kernel about its host. */
  async #ask(kernel: Kernel.IKernelConnection, known: Known): Promise<void> {
    known.asking = true;
    const answer = await this.#send(kernel, REQUEST, {}, this.#world);
    known.asking = false;
    const snapshot = answer?.snapshot;
    known.failed = !snapshot;
    if (!snapshot || this.#known.get(kernel) !== known) {
      if (!known.host) known.is = 'without';
      return;
    }
    const key = keyOf(snapshot.host);
    if (this.#isOwn(key)) known.is = 'near';
    else {
      known.host = key;
      known.pid = answer?.pid ?? null;
      this.#hosts.set(key, { snapshot: this.#named(snapshot, key), asked: false, silent: 0 });
    }
    this.#update();
  }

  #isOwn(key: string): boolean {
    return this.#own !== null && key === keyOf(this.#own.host);
  }

  /** Add this server's notebooks, which the other host may not know. */
  #named(snapshot: Snapshot, host: string): Snapshot {
    const names = this.#names();
    const pids = new Map<number, string>();
    for (const [kernel, known] of this.#known)
      if (known.host === host && known.pid !== null) pids.set(known.pid, kernel.id);
    // The other host may use its own ids for the kernels, and for their workers.
    const ids = new Map([...names.keys()].map((id) => [id, id]));
    for (const { pid, kernel } of snapshot.processes) {
      const id = pids.get(pid);
      if (id && kernel) ids.set(kernel, id);
    }
    const processes = snapshot.processes.map((process) => {
      const id = ids.get(process.kernel ?? '') ?? pids.get(process.pid) ?? null;
      const notebook = names.get(id ?? '') ?? process.notebook;
      return { ...process, kernel: id, notebook, mine: false, server: null, elsewhere: true };
    });
    return { ...snapshot, processes };
  }

  /** Show each GPU once: a container can have another name than the server, but the same GPUs. */
  #update(): void {
    const seen = new Set(this.#own?.gpus.map(({ uuid }) => uuid));
    const shown: OtherHost[] = [];
    for (const [key, { snapshot, silent }] of this.#hosts) {
      const gpus = snapshot.gpus.filter(({ uuid }) => !seen.has(uuid));
      if (snapshot.gpus.length && !gpus.length) continue;
      const uuids = new Set(gpus.map(({ uuid }) => uuid));
      for (const uuid of uuids) seen.add(uuid);
      const processes = snapshot.processes.filter(({ uuid }) => uuids.has(uuid));
      const old = silent >= SILENT_S ? silent : 0;
      const aged = gpus.map((gpu) => (old ? { ...gpu, age: Math.max(gpu.age, old) } : gpu));
      shown.push({ key, silent: old, snapshot: { ...snapshot, gpus: aged, processes } });
    }
    if (this.#any || shown.length) this.#show(shown);
    this.#any = shown.length > 0;
  }
}

/** Whether a request would be sent now: a broken connection would send it later. */
function canAsk(kernel: Kernel.IKernelConnection, known: Known): boolean {
  const runs = kernel.status === 'idle' || kernel.status === 'busy';
  return !known.asking && kernel.connectionStatus === 'connected' && runs;
}

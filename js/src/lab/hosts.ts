/**
 * The GPUs of other hosts, as kernels that run there tell: behind a gateway, a provisioner, SSH; and
 * those where only ranks of a kernel's cluster run, as that kernel has heard of them.
 *
 * A kernel is asked over the connection that its notebook or console has in this page. None is made
 * for the purpose: it would keep an idle kernel from being culled, and the server would hand it the
 * output that it keeps for a page whose connection broke.
 */

import { type Kernel, KernelMessage } from '@jupyterlab/services';
import type { Host, OtherHost, Snapshot } from '../snapshot.js';
import { toRankHosts, toSnapshot } from './audience.js';
import type { World } from './stream.js';

export type Content = Record<string, unknown>;

/** After so many milliseconds an answer is no longer waited for. */
const PATIENCE_MS = 5000;

/** What the kernel answers; null where it does not, in time. */
export async function ask(
  kernel: Kernel.IKernelConnection,
  type: string,
  content: Content,
  after: (milliseconds: number, then: () => void) => () => void,
): Promise<Content | null> {
  const message = KernelMessage.createMessage({
    channel: 'control',
    // The library's types know its own messages only; it sends any.
    msgType: type as 'debug_request',
    session: kernel.clientId,
    username: kernel.username,
    content: content as unknown as KernelMessage.IDebugRequestMsg['content'],
  });
  const future = kernel.sendControlMessage(message, true);
  const stop = after(PATIENCE_MS, () => future.dispose());
  try {
    return (await future.done).content as unknown as Content;
  } catch {
    // Put off, or the kernel was started anew or went.
    return null;
  } finally {
    stop();
  }
}

/** A host that has not answered for so many seconds is said to be silent, and then is forgotten. */
const SILENT_S = 3;
const GONE_S = 30;
/** Between two looks no more time counts: nobody asked. */
const LONGEST_S = 10;
/** By a comm of this name, gpumagic/magics/control_channel.py says that it is there. */
const TARGET = 'gpumagic';
const REQUEST = 'gpumagic_request';

/** What is known of a kernel. */
interface Known {
  /** Not asked yet; has no gpumagic; is on the server's host; is on another. */
  is: 'new' | 'without' | 'near' | 'far';
  asking: boolean;
  /** It did not answer when it was asked last. */
  failed: boolean;
  pid: number | null;
  host: string;
  /** It may have a cluster with ranks on other hosts: a cell of it has run, or it said so. */
  leads: boolean;
  /** By host, the processes of its ranks, and the time of what it said last. */
  ranks: Map<string, { pids: number[]; time: number }>;
}

interface Told {
  snapshot: Snapshot;
  /** It was asked, and has not answered since. */
  asked: boolean;
  silent: number;
}

const unknown = (): Known => {
  const none = { asking: false, failed: false, pid: null, host: '' };
  return { is: 'new', ...none, leads: true, ranks: new Map() };
};

const keyOf = ({ name, boot }: Host): string => `${name} ${boot ?? ''}`;

/**
 * Whether JupyterLab can tell a kernel's answer on the control channel from the end of its cell:
 * from 4.5 on, and Notebook from 7.5 on, where the server names the `untracked` types of messages.
 */
export function tellsApart(version: string, untracked: string): boolean {
  const [major = 0, minor = 0] = version.split('.').map(Number);
  const able = major === 4 || major === 7 ? minor >= 5 : major > 4;
  return able && untracked.includes(REQUEST);
}

export class Hosts {
  #world: Pick<World, 'now' | 'after'>;
  #connections: () => Iterable<Kernel.IKernelConnection>;
  #names: () => ReadonlyMap<string, string>;
  #tell: (hosts: OtherHost[]) => void;
  #known = new Map<Kernel.IKernelConnection, Known>();
  #hosts = new Map<string, Told>();
  #own: Snapshot | null = null;
  #here: string | null = null;
  #looked = 0;
  #any = false;

  /** `connections` of this page; `names` of the notebooks of all kernels, by the kernel's id. */
  constructor(
    world: Pick<World, 'now' | 'after'>,
    connections: () => Iterable<Kernel.IKernelConnection>,
    names: () => ReadonlyMap<string, string>,
    tell: (hosts: OtherHost[]) => void,
  ) {
    [this.#world, this.#connections, this.#names, this.#tell] = [world, connections, names, tell];
  }

  /** The kernel of the current notebook: the numbers of its GPUs are those to show. */
  here(kernel: string | null): void {
    this.#here = kernel;
  }

  /** Somebody looks, and this is the server's host now. */
  look(own: Snapshot): void {
    this.#own = own;
    const kernels = new Map([...this.#connections()].map((kernel) => [kernel.id, kernel]));
    this.#meet(new Set(kernels.values()));
    this.#age();
    const reporters = new Set([...this.#hosts.keys()].map((key) => this.#reporter(key)));
    for (const host of this.#hosts.values()) host.asked = true;
    for (const [kernel, known] of this.#known) {
      if (known.is === 'without' || !able(kernel, known)) continue;
      if (known.is === 'new') void this.#probe(kernel, known);
      else if (reporters.has(known)) void this.#ask(kernel, known);
      else if (known.leads) void this.#askOfRanks(kernel, known);
    }
    this.#show();
  }

  #age(): void {
    const now = this.#world.now() / 1000;
    const gap = Math.min(now - this.#looked, LONGEST_S);
    this.#looked = now;
    for (const [key, host] of this.#hosts) {
      const every = [...this.#known.values()];
      const there = every.filter((known) => known.host === key);
      const told = there.length > 0 || every.some((known) => known.ranks.has(key));
      if (host.asked) host.silent += gap;
      if (told && host.silent < GONE_S) continue;
      this.#hosts.delete(key);
      for (const known of there) known.is = 'without';
    }
  }

  #meet(kernels: ReadonlySet<Kernel.IKernelConnection>): void {
    for (const kernel of this.#known.keys()) {
      if (kernels.has(kernel)) continue;
      kernel.statusChanged.disconnect(this.#change);
      kernel.connectionStatusChanged.disconnect(this.#connect);
      kernel.iopubMessage.disconnect(this.#hear);
      this.#known.delete(kernel);
    }
    for (const kernel of kernels) {
      if (this.#known.has(kernel)) continue;
      kernel.statusChanged.connect(this.#change);
      kernel.connectionStatusChanged.connect(this.#connect);
      kernel.iopubMessage.connect(this.#hear);
      this.#known.set(kernel, unknown());
    }
  }

  #change = (kernel: Kernel.IKernelConnection, status: Kernel.Status): void => {
    const known = this.#known.get(kernel);
    if (known && status.endsWith('restarting')) Object.assign(known, unknown());
  };

  /** What it did not answer, the connection may have lost. */
  #connect = (kernel: Kernel.IKernelConnection, status: Kernel.ConnectionStatus): void => {
    const known = this.#known.get(kernel);
    if (known?.is === 'without' && status === 'connected') known.is = 'new';
  };

  /** A cell may have loaded gpumagic or started a cluster, as soon as it runs or at its end. */
  #hear = (kernel: Kernel.IKernelConnection, message: KernelMessage.IIOPubMessage): void => {
    const known = this.#known.get(kernel);
    const { header, parent_header: parent } = message;
    const ran = 'msg_type' in parent && parent.msg_type === 'execute_request';
    if (!known || !ran || (header.msg_type !== 'execute_input' && header.msg_type !== 'status'))
      return;
    known.leads = true;
    if (known.is === 'without') known.is = 'new';
  };

  /** Of a host's kernels the one to ask: that of the current notebook, or else any that answers. */
  #reporter(host: string): Known | undefined {
    const rank = ([kernel, { failed }]: [Kernel.IKernelConnection, Known]) =>
      Number(failed) * 2 + Number(kernel.id !== this.#here);
    return [...this.#known]
      .filter(([kernel, known]) => known.host === host && able(kernel, known))
      .sort((a, b) => rank(a) - rank(b))[0]?.[1];
  }

  /** Whether it has gpumagic, and where it is. */
  async #probe(kernel: Kernel.IKernelConnection, known: Known): Promise<void> {
    known.asking = true;
    const info = await kernel.info.catch(() => null);
    const python = info?.language_info.name === 'python';
    const asked = { target_name: TARGET };
    const answer = python && (await this.#answer(kernel, 'comm_info_request', asked));
    known.asking = false;
    known.is = answer && Object.keys(answer['comms'] ?? {}).length > 0 ? 'far' : 'without';
    if (known.is === 'far') await this.#ask(kernel, known);
  }

  async #ask(kernel: Kernel.IKernelConnection, known: Known): Promise<void> {
    known.asking = true;
    const answer = await this.#answer(kernel, REQUEST);
    known.asking = false;
    const snapshot = toSnapshot(answer?.['snapshot']);
    known.failed = snapshot === null;
    if (!snapshot || this.#known.get(kernel) !== known) {
      if (!known.host) known.is = 'without';
      return;
    }
    const key = keyOf(snapshot.host);
    if (this.#isOwn(key)) {
      known.is = 'near';
    } else {
      known.host = key;
      known.pid = typeof answer?.['pid'] === 'number' ? answer['pid'] : null;
      this.#set(key, snapshot);
    }
    this.#takeRanks(known, answer);
  }

  /** Of its own host it is not asked, which the server sees or another kernel tells. */
  async #askOfRanks(kernel: Kernel.IKernelConnection, known: Known): Promise<void> {
    known.asking = true;
    const answer = await this.#answer(kernel, REQUEST, { own: false });
    known.asking = false;
    if (this.#known.get(kernel) === known) this.#takeRanks(known, answer);
  }

  #takeRanks(known: Known, answer: Content | null): void {
    if (answer) {
      const [told, before] = [toRankHosts(answer['hosts']), known.ranks];
      const keyed = (told ?? []).map((host) => ({ ...host, key: keyOf(host.snapshot.host) }));
      known.leads = told !== null;
      known.ranks = new Map(
        keyed.map(({ key, pids, snapshot }) => [key, { pids, time: snapshot.time }]),
      );
      const kernels = new Set([...this.#known.values()].map(({ host }) => host));
      for (const { key, snapshot } of keyed)
        if (!this.#isOwn(key) && !kernels.has(key) && before.get(key)?.time !== snapshot.time)
          this.#set(key, snapshot);
    }
    this.#show();
  }

  #isOwn(key: string): boolean {
    return this.#own !== null && key === keyOf(this.#own.host);
  }

  #set(key: string, snapshot: Snapshot): void {
    this.#hosts.set(key, { snapshot: this.#named(snapshot, key), asked: false, silent: 0 });
  }

  #answer(kernel: Kernel.IKernelConnection, type: string, content: Content = {}) {
    return ask(kernel, type, content, (milliseconds, then) =>
      this.#world.after(milliseconds, then),
    );
  }

  /** With the notebooks of this server, which the kernel's own host may not know. */
  #named(snapshot: Snapshot, host: string): Snapshot {
    const names = this.#names();
    const pids = new Map<number, string>();
    for (const [kernel, known] of this.#known) {
      if (known.host === host && known.pid !== null) pids.set(known.pid, kernel.id);
      for (const pid of known.ranks.get(host)?.pids ?? []) pids.set(pid, kernel.id);
    }
    // What that host takes for the id of a kernel that is asked here, and of its workers.
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

  /** Each GPU once: a container may have another name than the server, and the same GPUs. */
  #show(): void {
    const seen = new Set(this.#own?.gpus.map(({ uuid }) => uuid));
    const told: OtherHost[] = [];
    for (const [key, { snapshot, silent }] of this.#hosts) {
      const gpus = snapshot.gpus.filter(({ uuid }) => !seen.has(uuid));
      if (snapshot.gpus.length && !gpus.length) continue;
      for (const { uuid } of gpus) seen.add(uuid);
      const shown = new Set(gpus.map(({ uuid }) => uuid));
      const processes = snapshot.processes.filter(({ uuid }) => shown.has(uuid));
      const old = silent >= SILENT_S ? silent : 0;
      const aged = gpus.map((gpu) => (old ? { ...gpu, age: Math.max(gpu.age, old) } : gpu));
      told.push({ key, silent: old, snapshot: { ...snapshot, gpus: aged, processes } });
    }
    if (this.#any || told.length) this.#tell(told);
    this.#any = told.length > 0;
  }
}

/** What is sent while the connection is away would be kept, and sent when it is back. */
function able(kernel: Kernel.IKernelConnection, known: Known): boolean {
  const runs = kernel.status === 'idle' || kernel.status === 'busy';
  return !known.asking && kernel.connectionStatus === 'connected' && runs;
}

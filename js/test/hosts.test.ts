/** Kernels on other hosts: which are asked, how often, and how the monitor shows their GPUs. */

import type { Kernel } from '@jupyterlab/services';
import { beforeEach, describe, expect, test } from 'vitest';
import { ask, isAble } from '../src/lab/current-kernel.js';
import { Hosts } from '../src/lab/hosts.js';
import type { OtherHost, Snapshot } from '../src/snapshot.js';
import { FakeEnvironment, settled, snapshot } from './environment.js';
import { all, at, BUSY, fixture, GIB, mount, one, text } from './stage.js';

class Signal {
  slots = new Set<(...said: unknown[]) => void>();
  connect = (slot: (...said: unknown[]) => void) => this.slots.add(slot);
  disconnect = (slot: (...said: unknown[]) => void) => this.slots.delete(slot);
}

/** The snapshot of a host with one GPU, on which a process holds memory. */
function snapshotOf(name: string, uuid: string, process: Partial<Snapshot['processes'][0]> = {}) {
  const [gpu, holder] = [at(fixture().gpus, BUSY), at(fixture().processes, 0)];
  const blank = { notebook: null, kernel: null, mine: false, orphan: false, pid: 70 };
  return snapshot(900, {
    host: { ...snapshot(0).host, name, boot: `boot of ${name}` },
    gpus: [{ ...gpu, uuid }],
    processes: [{ ...holder, ...blank, uuid, ...process }],
  });
}

/** A kernel that answers at once, or not at all. */
class FakeKernel {
  status = 'busy';
  connectionStatus = 'connected';
  statusChanged = new Signal();
  connectionStatusChanged = new Signal();
  iopubMessage = new Signal();
  clientId = 'client';
  username = 'user';
  info = Promise.resolve({ language_info: { name: 'python' } });
  /** What it was asked, and on which channel. */
  asked: string[] = [];
  loaded = true;
  mute = false;
  pid = 70;

  constructor(
    readonly id: string,
    public says: Snapshot,
  ) {}

  sendControlMessage(message: { channel: string; header: { msg_type: string } }) {
    const type = message.header.msg_type;
    this.asked.push(type);
    expect(message.channel).toBe('control');
    let dispose = () => {};
    const listed = this.loaded ? { c1: { target_name: 'gpumagic' } } : {};
    const content =
      type === 'comm_info_request'
        ? { status: 'ok', comms: listed }
        : { status: 'ok', pid: this.pid, snapshot: this.says };
    const done = this.mute
      ? new Promise((_, reject) => {
          dispose = () => reject(new Error('canceled'));
        })
      : Promise.resolve({ content });
    return { done, dispose: () => dispose() };
  }

  /** It runs a cell from begin to end. */
  run(): void {
    const parent_header = { msg_type: 'execute_request' };
    for (const msg_type of ['execute_input', 'status'])
      for (const slot of this.iopubMessage.slots)
        slot(this, { header: { msg_type }, parent_header });
  }

  become(status: string): void {
    this.status = status;
    for (const slot of this.statusChanged.slots) slot(this, status);
  }
}

describe('asking kernels', () => {
  const own = snapshot(1000, {
    host: { ...snapshot(0).host, name: 'lab', boot: 'boot of lab' },
    gpus: [{ ...at(fixture().gpus, BUSY), uuid: 'GPU-own' }],
  });
  let environment: FakeEnvironment;
  let kernels: FakeKernel[];
  let names: Map<string, string>;
  let hosts: Hosts;
  let shown: OtherHost[];

  beforeEach(() => {
    environment = new FakeEnvironment();
    kernels = [];
    names = new Map();
    shown = [];
    hosts = new Hosts(
      environment,
      () => kernels as unknown as Kernel.IKernelConnection[],
      () => names,
      (list) => {
        shown = list;
      },
      ask,
    );
  });

  /** Show the monitor for some seconds. */
  async function watch(seconds = 1): Promise<void> {
    for (let n = 0; n < seconds; n++) {
      hosts.poll(own);
      await settled();
      await environment.pass(1000);
    }
  }

  const start = (id: string, says: Snapshot): FakeKernel => {
    const kernel = new FakeKernel(id, says);
    kernels.push(kernel);
    return kernel;
  };
  const uuids = () => shown.map((host) => host.snapshot.gpus.map(({ uuid }) => uuid));

  test('a kernel on another host adds the host, and is asked again at each poll', async () => {
    const kernel = start('k1', snapshotOf('node', 'GPU-9'));
    await watch();
    expect(shown.map((host) => host.snapshot.host.name)).toEqual(['node']);
    expect(uuids()).toEqual([['GPU-9']]);
    await watch(2);
    expect(kernel.asked).toEqual(['comm_info_request', ...Array(3).fill('gpumagic_request')]);
  });

  test('a kernel on the server’s host adds nothing, and is asked again only after a restart', async () => {
    const kernel = start('k1', { ...snapshotOf('lab', 'GPU-own'), host: own.host });
    await watch(5);
    expect(kernel.asked).toEqual(['comm_info_request', 'gpumagic_request']);
    expect(shown).toEqual([]);
    kernel.become('restarting');
    kernel.become('idle');
    await watch();
    expect(kernel.asked).toHaveLength(4);
  });

  test('a restarted kernel’s host is removed until the kernel loads gpumagic again', async () => {
    const kernel = start('k1', snapshotOf('node', 'GPU-9'));
    await watch();
    kernel.loaded = false;
    kernel.become('restarting');
    kernel.become('idle');
    await watch();
    expect(shown).toEqual([]);
    kernel.loaded = true;
    kernel.run();
    await watch();
    expect(uuids()).toEqual([['GPU-9']]);
  });

  test('a kernel without gpumagic is asked again only after a cell has run', async () => {
    const kernel = start('k1', snapshotOf('node', 'GPU-9'));
    kernel.loaded = false;
    await watch(5);
    expect(kernel.asked).toEqual(['comm_info_request']);
    kernel.loaded = true;
    kernel.run();
    await watch();
    expect(uuids()).toEqual([['GPU-9']]);
  });

  test('kernels that are not Python, are starting, or are disconnected are not asked', async () => {
    const [r, begins, away] = ['k1', 'k2', 'k3'].map((id) =>
      start(id, snapshotOf('node', 'GPU-9')),
    );
    Object.assign(r as object, { info: Promise.resolve({ language_info: { name: 'R' } }) });
    Object.assign(begins as object, { status: 'starting' });
    Object.assign(away as object, { connectionStatus: 'connecting' });
    await watch(3);
    expect(kernels.flatMap(({ asked }) => asked)).toEqual([]);
  });

  test('one kernel of each host is asked, and another one if it does not answer', async () => {
    const [first, second] = ['k1', 'k2'].map((id) => start(id, snapshotOf('node', 'GPU-9'))) as [
      FakeKernel,
      FakeKernel,
    ];
    await watch(3);
    const before = [first.asked.length, second.asked.length];
    expect(before).toEqual([4, 2]);
    first.mute = true;
    await watch(8);
    expect(second.asked.length).toBeGreaterThan(2);
    expect(at(shown, 0).silent).toBe(0);
  });

  test('a host whose kernel stops answering is shown as silent, then removed, and comes back', async () => {
    const kernel = start('k1', snapshotOf('node', 'GPU-9'));
    await watch();
    kernel.mute = true;
    await watch(6);
    expect(at(shown, 0).silent).toBeGreaterThan(3);
    expect(at(at(shown, 0).snapshot.gpus, 0).age).toBeGreaterThan(3);
    const asked = kernel.asked.length;
    // One request at a time.
    expect(asked).toBeLessThan(5);
    await watch(30);
    expect(shown).toEqual([]);
    kernel.mute = false;
    await watch(5);
    expect(shown).toEqual([]);
    kernel.run();
    await watch();
    expect(uuids()).toEqual([['GPU-9']]);
  });

  test('a kernel is asked again after a long disconnection', async () => {
    const kernel = start('k1', snapshotOf('node', 'GPU-9'));
    await watch();
    kernel.connectionStatus = 'connecting';
    await watch(40);
    expect(shown).toEqual([]);
    kernel.connectionStatus = 'connected';
    for (const slot of kernel.connectionStatusChanged.slots) slot(kernel, 'connected');
    await watch();
    expect(uuids()).toEqual([['GPU-9']]);
  });

  test('time without polls does not count as silence', async () => {
    start('k1', snapshotOf('node', 'GPU-9'));
    await watch();
    await environment.pass(600_000);
    await watch();
    expect(uuids()).toEqual([['GPU-9']]);
    expect(at(shown, 0).silent).toBe(0);
  });

  test('each GPU is shown once: on the server’s host, or on the first that reported it', async () => {
    start('k1', snapshotOf('pod', 'GPU-own'));
    start('k2', snapshotOf('node', 'GPU-9'));
    start('k3', snapshotOf('other', 'GPU-9'));
    await watch(2);
    expect(uuids()).toEqual([['GPU-9']]);
  });

  test('processes get this server’s notebooks, by kernel or by pid, and no other server’s', async () => {
    const says = snapshotOf('node', 'GPU-9', { kernel: 'k1', notebook: 'wrong.ipynb', mine: true });
    const [process] = says.processes as [Snapshot['processes'][0]];
    says.processes.push(
      { ...process, kernel: 'its own id', pid: 71, mine: false },
      { ...process, kernel: 'its own id', pid: 72, mine: false, child: true },
      { ...process, kernel: 'a stranger', pid: 73, notebook: 'else.ipynb', mine: false },
    );
    start('k1', says);
    const ssh = start('k2', says);
    ssh.pid = 71;
    names = new Map([
      ['k1', 'work/train.ipynb'],
      ['k2', 'ssh.ipynb'],
    ]);
    await watch(3);
    const seen = at(shown, 0).snapshot.processes;
    expect(seen.map(({ pid, kernel, notebook, mine }) => [pid, kernel, notebook, mine])).toEqual([
      [70, 'k1', 'work/train.ipynb', false],
      [71, 'k2', 'ssh.ipynb', false],
      [72, 'k2', 'ssh.ipynb', false],
      [73, null, 'else.ipynb', false],
    ]);
    expect(seen.every(({ elsewhere }) => elsewhere)).toBe(true);
  });

  test('the kernel of a closed notebook is not asked any more', async () => {
    const kernel = start('k1', snapshotOf('node', 'GPU-9'));
    await watch();
    kernels = [];
    await watch();
    expect(shown).toEqual([]);
    await watch();
    expect(kernel.asked).toHaveLength(2);
    const { iopubMessage, statusChanged, connectionStatusChanged } = kernel;
    for (const { slots } of [iopubMessage, statusChanged, connectionStatusChanged])
      expect(slots.size).toBe(0);
  });
});

test('only a JupyterLab that keeps a cell’s state while its kernel answers requests', () => {
  const untracked = '["stream", "gpumagic_request"]';
  for (const able of ['4.5.0', '4.6.6', '5.0.0', '7.5.1']) {
    expect(isAble(able, untracked)).toBe(true);
    // The server is too old to ignore our requests.
    expect(isAble(able, '')).toBe(false);
  }
  for (const older of ['4.2.0', '4.4.10', '3.6.0', '7.4.0'])
    expect(isAble(older, untracked)).toBe(false);
});

describe('in the monitor', () => {
  const other = (name: string, ...gpus: string[]): OtherHost => {
    const says = snapshotOf(name, at(gpus, 0) ?? '', { kernel: 'k1', notebook: 'far.ipynb' });
    const [gpu] = says.gpus as [Snapshot['gpus'][0]];
    says.gpus = gpus.map((uuid) => ({ ...gpu, uuid }));
    return { key: name, snapshot: says, silent: 0 };
  };
  const heads = '.machine-head > h2:not([hidden])';
  const sections = '.machine';

  test('one host has no heading, several have one each, above their GPUs', () => {
    const monitor = mount();
    expect(all(monitor, heads)).toEqual([]);
    expect(one(monitor, '.machine-head').textContent).toContain('ml-box-03');
    monitor.set({ hosts: [other('node-7', 'GPU-8'), other('node-8', 'GPU-9')] });
    monitor.draw();
    expect(text(monitor, heads)).toEqual(['ml-box-03', 'node-7', 'node-8']);
    const [own, ...others] = all(monitor, sections) as [HTMLElement, ...HTMLElement[]];
    expect(own.ariaLabel).toBe('GPUs of ml-box-03');
    expect(others.map((node) => node.ariaLabel)).toEqual(['GPUs of node-7', 'GPUs of node-8']);
    expect(others.map((node) => node.querySelectorAll('.gpu').length)).toEqual([1, 1]);
    expect(at(others, 0).textContent).toContain('far.ipynb');
    monitor.set({ hosts: [] });
    monitor.draw();
    expect(all(monitor, heads)).toEqual([]);
    expect(all(monitor, sections)).toHaveLength(1);
  });

  test('GPUs are closed if the hosts together have many', () => {
    const own = { ...fixture(), gpus: fixture().gpus.slice(2, 4) };
    const monitor = mount(own);
    expect(all(monitor, '.opened')).toHaveLength(2);
    monitor.set({ hosts: [other('node-7', 'GPU-7', 'GPU-8')] });
    monitor.draw();
    expect(all(monitor, '.gpu')).toHaveLength(4);
    // Only this notebook's stays open.
    expect(all(monitor, '.opened')).toHaveLength(1);
  });

  test('other hosts’ GPUs come before the reason why the server has none', () => {
    const monitor = mount(snapshot(1, { problems: fixture().problems.slice(0, 1) }));
    const doctor = one(monitor, '.doctor');
    monitor.set({ hosts: [other('node-7', 'GPU-7')] });
    monitor.draw();
    expect(doctor.hidden).toBe(false);
    const follows = one(monitor, sections).compareDocumentPosition(doctor);
    expect(follows & Node.DOCUMENT_POSITION_FOLLOWING).toBeTruthy();
  });

  test('a silent host says for how long, and a host without a GPU says so', () => {
    const monitor = mount();
    const bare = { ...other('node-8', 'GPU-9'), silent: 0 };
    bare.snapshot = { ...bare.snapshot, gpus: [], processes: [] };
    monitor.set({ hosts: [{ ...other('node-7', 'GPU-8'), silent: 12 }, bare] });
    monitor.draw();
    expect(text(monitor, '.silent .machine-head')).toEqual([
      expect.stringContaining('no answer for 12 s'),
    ]);
    expect(text(monitor, '.machine > p:not([hidden])')).toEqual(['No GPU is visible here.']);
  });

  test('an orphaned process there is shown, and cannot be ended from here', () => {
    const monitor = mount(fixture(), { terminate: () => {} });
    const ends = () => all(monitor, '.trouble .acts:not([hidden]) button:not([hidden])').length;
    const before = ends();
    const orphan = { orphan: true, name: 'python3', memory: GIB, elsewhere: true };
    const says = snapshotOf('node-7', 'GPU-8', orphan);
    monitor.set({ hosts: [{ key: 'node-7', snapshot: says, silent: 0 }] });
    monitor.draw();
    expect(text(monitor, '.machine + .machine .trouble')).toEqual([
      expect.stringContaining('still running'),
    ]);
    expect(ends()).toBe(before);
  });
});

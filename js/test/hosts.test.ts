/** Kernels on other hosts: who is asked, how often, and how their GPUs stand in the monitor. */

import type { Kernel } from '@jupyterlab/services';
import { beforeEach, describe, expect, test } from 'vitest';
import { ask, isAble } from '../src/lab/current-kernel.js';
import { Hosts } from '../src/lab/hosts.js';
import type { OtherHost, Snapshot } from '../src/snapshot.js';
import { all, at, BUSY, fixture, GIB, mount, one, text } from './stage.js';
import { FakeWorld, settled, snapshot } from './world.js';

class Signal {
  slots = new Set<(...said: unknown[]) => void>();
  connect = (slot: (...said: unknown[]) => void) => this.slots.add(slot);
  disconnect = (slot: (...said: unknown[]) => void) => this.slots.delete(slot);
}

/** A host's word: one GPU, which a process holds. */
function told(name: string, uuid: string, process: Partial<Snapshot['processes'][0]> = {}) {
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

describe('kernels are asked', () => {
  const own = snapshot(1000, {
    host: { ...snapshot(0).host, name: 'lab', boot: 'boot of lab' },
    gpus: [{ ...at(fixture().gpus, BUSY), uuid: 'GPU-own' }],
  });
  let world: FakeWorld;
  let kernels: FakeKernel[];
  let names: Map<string, string>;
  let hosts: Hosts;
  let shown: OtherHost[];

  beforeEach(() => {
    world = new FakeWorld();
    kernels = [];
    names = new Map();
    shown = [];
    hosts = new Hosts(
      world,
      () => kernels as unknown as Kernel.IKernelConnection[],
      () => names,
      (list) => {
        shown = list;
      },
      ask,
    );
  });

  /** The monitor is seen for some seconds. */
  async function look(seconds = 1): Promise<void> {
    for (let n = 0; n < seconds; n++) {
      hosts.look(own);
      await settled();
      await world.pass(1000);
    }
  }

  const start = (id: string, says: Snapshot): FakeKernel => {
    const kernel = new FakeKernel(id, says);
    kernels.push(kernel);
    return kernel;
  };
  const uuids = () => shown.map((host) => host.snapshot.gpus.map(({ uuid }) => uuid));

  test('one on another host adds it, and is asked again at each look', async () => {
    const kernel = start('k1', told('node', 'GPU-9'));
    await look();
    expect(shown.map((host) => host.snapshot.host.name)).toEqual(['node']);
    expect(uuids()).toEqual([['GPU-9']]);
    await look(2);
    expect(kernel.asked).toEqual(['comm_info_request', ...Array(3).fill('gpumagic_request')]);
  });

  test('one on the server’s host adds nothing, and is not asked again until it restarts', async () => {
    const kernel = start('k1', { ...told('lab', 'GPU-own'), host: own.host });
    await look(5);
    expect(kernel.asked).toEqual(['comm_info_request', 'gpumagic_request']);
    expect(shown).toEqual([]);
    kernel.become('restarting');
    kernel.become('idle');
    await look();
    expect(kernel.asked).toHaveLength(4);
  });

  test('one that restarts is no longer there, until it has gpumagic again', async () => {
    const kernel = start('k1', told('node', 'GPU-9'));
    await look();
    kernel.loaded = false;
    kernel.become('restarting');
    kernel.become('idle');
    await look();
    expect(shown).toEqual([]);
    kernel.loaded = true;
    kernel.run();
    await look();
    expect(uuids()).toEqual([['GPU-9']]);
  });

  test('one without gpumagic is not asked for what it does not know, until a cell has run', async () => {
    const kernel = start('k1', told('node', 'GPU-9'));
    kernel.loaded = false;
    await look(5);
    expect(kernel.asked).toEqual(['comm_info_request']);
    kernel.loaded = true;
    kernel.run();
    await look();
    expect(uuids()).toEqual([['GPU-9']]);
  });

  test('one that is not Python, starts, or whose connection is away is left alone', async () => {
    const [r, begins, away] = ['k1', 'k2', 'k3'].map((id) => start(id, told('node', 'GPU-9')));
    Object.assign(r as object, { info: Promise.resolve({ language_info: { name: 'R' } }) });
    Object.assign(begins as object, { status: 'starting' });
    Object.assign(away as object, { connectionStatus: 'connecting' });
    await look(3);
    expect(kernels.flatMap(({ asked }) => asked)).toEqual([]);
  });

  test('of the kernels of one host one is asked, that of the current notebook first', async () => {
    const [first, second] = [
      start('k1', told('node', 'GPU-9')),
      start('k2', told('node', 'GPU-9')),
    ];
    await look(3);
    const before = [first.asked.length, second.asked.length];
    expect(Math.min(...before)).toBe(2);
    hosts.here('k2');
    await look(3);
    expect([first.asked.length, second.asked.length]).toEqual([before[0], (before[1] ?? 0) + 3]);
    second.mute = true;
    await look(8);
    expect(first.asked.length).toBeGreaterThan(before[0] ?? 0);
    expect(at(shown, 0).silent).toBe(0);
  });

  test('a host whose kernel answers no more is silent, then gone, and comes back', async () => {
    const kernel = start('k1', told('node', 'GPU-9'));
    await look();
    kernel.mute = true;
    await look(6);
    expect(at(shown, 0).silent).toBeGreaterThan(3);
    expect(at(at(shown, 0).snapshot.gpus, 0).age).toBeGreaterThan(3);
    const asked = kernel.asked.length;
    // One question at a time.
    expect(asked).toBeLessThan(5);
    await look(30);
    expect(shown).toEqual([]);
    kernel.mute = false;
    await look(5);
    expect(shown).toEqual([]);
    kernel.run();
    await look();
    expect(uuids()).toEqual([['GPU-9']]);
  });

  test('one whose connection was away for long is asked again when it is back', async () => {
    const kernel = start('k1', told('node', 'GPU-9'));
    await look();
    kernel.connectionStatus = 'connecting';
    await look(40);
    expect(shown).toEqual([]);
    kernel.connectionStatus = 'connected';
    for (const slot of kernel.connectionStatusChanged.slots) slot(kernel, 'connected');
    await look();
    expect(uuids()).toEqual([['GPU-9']]);
  });

  test('the time in which nobody looked is not held against a host', async () => {
    start('k1', told('node', 'GPU-9'));
    await look();
    await world.pass(600_000);
    await look();
    expect(uuids()).toEqual([['GPU-9']]);
    expect(at(shown, 0).silent).toBe(0);
  });

  test('a GPU stands once: on the server’s host, or where it was told of first', async () => {
    start('k1', told('pod', 'GPU-own'));
    start('k2', told('node', 'GPU-9'));
    start('k3', told('other', 'GPU-9'));
    await look(2);
    expect(uuids()).toEqual([['GPU-9']]);
  });

  test('processes have this server’s notebooks, by kernel or by pid, and no other’s buttons', async () => {
    const says = told('node', 'GPU-9', { kernel: 'k1', notebook: 'wrong.ipynb', mine: true });
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
    await look(3);
    const seen = at(shown, 0).snapshot.processes;
    expect(seen.map(({ pid, kernel, notebook, mine }) => [pid, kernel, notebook, mine])).toEqual([
      [70, 'k1', 'work/train.ipynb', false],
      [71, 'k2', 'ssh.ipynb', false],
      [72, 'k2', 'ssh.ipynb', false],
      [73, null, 'else.ipynb', false],
    ]);
    expect(seen.every(({ elsewhere }) => elsewhere)).toBe(true);
  });

  test('a notebook that was closed is asked no more', async () => {
    const kernel = start('k1', told('node', 'GPU-9'));
    await look();
    kernels = [];
    await look();
    expect(shown).toEqual([]);
    await look();
    expect(kernel.asked).toHaveLength(2);
    const { iopubMessage, statusChanged, connectionStatusChanged } = kernel;
    for (const { slots } of [iopubMessage, statusChanged, connectionStatusChanged])
      expect(slots.size).toBe(0);
  });
});

test('only a JupyterLab that keeps a cell’s state while its kernel is asked', () => {
  const told = '["stream", "gpumagic_request"]';
  for (const able of ['4.5.0', '4.6.6', '5.0.0', '7.5.1']) {
    expect(isAble(able, told)).toBe(true);
    // The server is too old to leave what we ask aside.
    expect(isAble(able, '')).toBe(false);
  }
  for (const older of ['4.2.0', '4.4.10', '3.6.0', '7.4.0'])
    expect(isAble(older, told)).toBe(false);
});

describe('in the monitor', () => {
  const other = (name: string, ...gpus: string[]): OtherHost => {
    const says = told(name, at(gpus, 0) ?? '', { kernel: 'k1', notebook: 'far.ipynb' });
    const [gpu] = says.gpus as [Snapshot['gpus'][0]];
    says.gpus = gpus.map((uuid) => ({ ...gpu, uuid }));
    return { key: name, snapshot: says, silent: 0 };
  };
  const heads = '.host-head:not([hidden]) > h2';

  test('one host has no heading, several have one each, above their GPUs', () => {
    const monitor = mount();
    expect(all(monitor, heads)).toEqual([]);
    expect(text(monitor, '.host')).toEqual([expect.stringContaining('ml-box-03')]);
    monitor.set({ hosts: [other('node-7', 'GPU-8'), other('node-8', 'GPU-9')] });
    monitor.draw();
    expect(text(monitor, heads)).toEqual(['ml-box-03', 'node-7', 'node-8']);
    // A MIG device is a part of one.
    const { gpus } = fixture();
    const count = gpus.filter(({ mig }) => mig === null).length + 2;
    expect(count).toBeLessThan(gpus.length + 2);
    expect(text(monitor, '.host')).toEqual([`3 hosts · ${count} GPUs`]);
    const sections = all(monitor, '.host-section');
    expect(sections.map((node) => node.ariaLabel)).toEqual(['GPUs of node-7', 'GPUs of node-8']);
    expect(sections.map((node) => node.querySelectorAll('.gpu').length)).toEqual([1, 1]);
    expect(at(sections, 0).textContent).toContain('far.ipynb');
    monitor.set({ hosts: [] });
    monitor.draw();
    expect(all(monitor, heads)).toEqual([]);
    expect(all(monitor, '.host-section')).toEqual([]);
  });

  test('lines where all together are many', () => {
    const own = { ...fixture(), gpus: fixture().gpus.slice(2, 4) };
    const monitor = mount(own);
    expect(all(monitor, '.opened')).toHaveLength(2);
    monitor.set({ hosts: [other('node-7', 'GPU-7', 'GPU-8')] });
    monitor.draw();
    expect(all(monitor, '.gpu')).toHaveLength(4);
    // This notebook's.
    expect(all(monitor, '.opened')).toHaveLength(1);
  });

  test('where the server has no GPU, those of others come before why', () => {
    const monitor = mount(snapshot(1, { problems: fixture().problems.slice(0, 1) }));
    const doctor = one(monitor, '.doctor');
    monitor.set({ hosts: [other('node-7', 'GPU-7')] });
    monitor.draw();
    expect(doctor.hidden).toBe(false);
    const follows = one(monitor, '.host-section').compareDocumentPosition(doctor);
    expect(follows & Node.DOCUMENT_POSITION_FOLLOWING).toBeTruthy();
  });

  test('a silent host says for how long, and one without a GPU that it has none', () => {
    const monitor = mount();
    const bare = { ...other('node-8', 'GPU-9'), silent: 0 };
    bare.snapshot = { ...bare.snapshot, gpus: [], processes: [] };
    monitor.set({ hosts: [{ ...other('node-7', 'GPU-8'), silent: 12 }, bare] });
    monitor.draw();
    expect(text(monitor, '.silent .host-head')).toEqual([
      expect.stringContaining('no answer for 12 s'),
    ]);
    expect(text(monitor, '.host-section > p:not([hidden])')).toEqual(['No GPU is visible there.']);
  });

  test('what was left behind there is told, and cannot be ended from here', () => {
    const monitor = mount(fixture(), { terminate: () => {} });
    const ends = () => all(monitor, '.trouble .acts:not([hidden]) button:not([hidden])').length;
    const before = ends();
    const orphan = { orphan: true, name: 'python3', memory: GIB, elsewhere: true };
    const says = told('node-7', 'GPU-8', orphan);
    monitor.set({ hosts: [{ key: 'node-7', snapshot: says, silent: 0 }] });
    monitor.draw();
    expect(text(monitor, '.host-section .trouble')).toEqual([
      expect.stringContaining('still running'),
    ]);
    expect(ends()).toBe(before);
  });
});

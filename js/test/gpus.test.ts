import { describe, expect, test } from 'vitest';
import type { GpuSample, ProcessSample, Snapshot } from '../src/snapshot.js';
import { all, at, BUSY, crowd, fixture, GIB, mount, one, text, virtualGpu } from './stage.js';

const process = (uuid: string, more: Partial<ProcessSample> = {}): ProcessSample => ({
  ...at(fixture().processes, 0),
  uuid,
  mine: false,
  ordinal: null,
  utilization: null,
  ...more,
});
const book = (uuid: string, name: string, bytes: number, pid = 1): ProcessSample =>
  process(uuid, { notebook: `work/${name}`, kernel: `k ${name}`, memory: bytes, pid });
const names = (monitor: ReturnType<typeof mount>): string[] =>
  text(monitor, '.gpus > .gpu > .head .open');

describe('many GPUs', () => {
  test('this notebook’s GPUs come first, and are open if they are few', () => {
    const snapshot = crowd(8);
    for (const gpu of snapshot.gpus) gpu.ordinal = gpu.index;
    snapshot.processes = [book('GPU-5', 'train.ipynb', GIB), book('GPU-2', 'other.ipynb', GIB)];
    const monitor = mount(snapshot);
    expect(names(monitor).slice(0, 2)).toEqual(['cuda:0', 'cuda:1']);
    monitor.set({ here: 'k train.ipynb' });
    monitor.draw();
    expect(names(monitor).slice(0, 2)).toEqual(['cuda:5', 'cuda:0']);
    const opened = () =>
      all(monitor, '.head .open[aria-expanded=true]').map((button) => button.textContent);
    expect(opened()).toEqual(['cuda:5']);
    // Closed by the user, it stays closed.
    one(monitor, '.open[aria-expanded=true]').click();
    monitor.update({ ...snapshot, time: snapshot.time + 1 });
    monitor.draw();
    expect(opened()).toEqual([]);
    snapshot.processes = snapshot.gpus.map(({ uuid }) => book(uuid, 'train.ipynb', GIB));
    monitor.update({ ...snapshot, time: snapshot.time + 2 });
    monitor.draw();
    expect(opened()).toEqual([]);
  });

  test('the details of an open GPU are up to date', () => {
    const snapshot = crowd(8);
    const monitor = mount(snapshot);
    one(monitor, '.gpu .open').click();
    const gpus = snapshot.gpus.map((gpu) => ({ ...gpu, memory_utilization: 12.34 }));
    monitor.update({ ...snapshot, gpus, time: snapshot.time + 1 });
    monitor.draw();
    one(monitor, '.gpu .axis > .more').click();
    monitor.draw();
    expect(text(monitor, '.facts dd')[0]).toMatch(/^12\b/);
  });

  test('one line sums up many GPUs', () => {
    const snapshot = crowd(8);
    snapshot.gpus.forEach((gpu, n) => {
      gpu.ordinal = n;
      gpu.utilization = n < 5 ? 50 : 0;
      gpu.memory_used = n < 6 ? 10 * GIB : 0;
    });
    at(snapshot.gpus, 0).lost = true;
    const summary = () => text(monitor, '.summary:not([hidden])');
    const monitor = mount(snapshot);
    expect(summary()).toEqual(['8 GPUs · free: 6, 7 · 1 lost']);
    monitor.update(crowd(3));
    monitor.draw();
    expect(summary()).toEqual([]);
  });
});

describe('virtual GPUs of other kernels', () => {
  const virtual = (uuid: string, ordinal: number): GpuSample => ({
    ...virtualGpu(),
    uuid,
    virtual_ordinal: ordinal,
    memory_used: GIB,
  });
  const snapshot = (): Snapshot => ({
    ...fixture(),
    gpus: [virtual('a0', 0), virtual('a1', 1), virtual('b0', 0)],
    processes: [
      book('a0', 'explore.ipynb', GIB),
      book('a1', 'explore.ipynb', GIB),
      book('b0', 'train.ipynb', GIB, 2),
    ],
    problems: [],
  });

  test('name their notebook; this notebook’s come first and are open', () => {
    const monitor = mount(snapshot());
    expect(text(monitor, '.opened .whose')).toEqual([
      'explore.ipynb',
      'explore.ipynb',
      'train.ipynb',
    ]);
    const many = snapshot();
    many.gpus.unshift(virtual('a2', 2));
    many.processes.push(book('a2', 'explore.ipynb', GIB));
    monitor.set({ here: 'k train.ipynb' });
    monitor.update(many);
    monitor.draw();
    expect(text(monitor, '.opened > .head .open')).toEqual(['cuda:0']);
    expect(text(monitor, '.summary:not([hidden])')).toEqual(['4 GPUs']);
    expect(text(monitor, '.gpu:not(.opened) .whose')).toEqual(Array(3).fill('explore.ipynb'));
    expect(names(monitor)).toEqual(['cuda:0', 'cuda:2', 'cuda:0', 'cuda:1']);
  });
});

describe('names', () => {
  const busy = (more: Partial<GpuSample> = {}): GpuSample => ({
    ...at(fixture().gpus, BUSY),
    uuid: 'u',
    ...more,
  });

  test('a GPU is cuda:0, and also GPU 1 if nvidia-smi has another number', () => {
    const monitor = mount({ ...fixture(), gpus: [busy({ ordinal: 0, index: 1 })] });
    const named = () => [
      one(monitor, '.head .open').textContent,
      one(monitor, '.vitals').textContent,
    ];
    expect(named()).toEqual(['cuda:0', expect.stringContaining(' · GPU 1 · ')]);
    // The ordinal in this notebook, not in the server.
    const own = process('u', { kernel: 'k', ordinal: 1 });
    monitor.set({ here: 'k' });
    monitor.update({ ...fixture(), gpus: [busy({ ordinal: 0, index: 1 })], processes: [own] });
    monitor.draw();
    expect(named()).toEqual(['cuda:1', expect.not.stringContaining('GPU')]);
  });

  test('other holders are named by user, by program, or as exited', () => {
    const nobody = { notebook: null, kernel: null, name: null, user: null };
    const monitor = mount({
      ...fixture(),
      gpus: [busy()],
      processes: [
        process('u', { ...nobody, pid: 1, memory: 3 * GIB, user: 'alice' }),
        process('u', { ...nobody, pid: 2, memory: 2 * GIB, user: 'ada', name: 'python3' }),
        process('u', { ...nobody, pid: 3, memory: GIB }),
      ],
    });
    const who = text(monitor, 'li.process .who');
    expect(who).toEqual(['alice', 'python3', 'exited (PID 3)', 'system']);
  });

  test('a process that outlives its kernel says which notebook started it', () => {
    const server = process('u', { kernel: null, name: 'vllm', pid: 7, idle_since: null });
    const monitor = mount({
      ...fixture(),
      gpus: [busy({ memory_used: 10 * GIB })],
      processes: [server],
    });
    expect(text(monitor, 'li.process')).toEqual([
      'vllm10.0 GiBcuda:0 · started by train.ipynb, still running · PID 7',
    ]);
  });

  test('a notebook’s row shows its running cell and the time since its start', () => {
    const snapshot = { ...fixture(), gpus: [busy()], processes: [process('u', { kernel: 'k' })] };
    const run = { id: 'a', kernel: 'k', notebook: 'x', count: 7, end: null, gpus: ['u'] };
    const monitor = mount(snapshot);
    monitor.mark([{ ...run, start: snapshot.time - 130 }]);
    monitor.draw();
    expect(text(monitor, '.process .note:not([hidden])')).toEqual(['cuda:0 · In [7] · 2 min']);
    monitor.mark([{ ...run, start: snapshot.time - 130, end: snapshot.time }]);
    monitor.draw();
    expect(text(monitor, '.process .note:not([hidden])')).toEqual(['cuda:0 · idle 3 min']);
  });

  test('memory that is nearly full is in the color of a warning', () => {
    const gpus = [busy({ memory_used: 79.2 * GIB }), busy({ uuid: 'v', memory_used: 20 * GIB })];
    const monitor = mount({ ...fixture(), gpus });
    const values = all(monitor, '.cap b').filter((node) => node.textContent?.includes('GiB'));
    expect(values.map((node) => node.className)).toEqual(['warn', '']);
  });

  test('MIG devices of one profile are numbered', () => {
    const [parent, slice] = fixture().gpus as [GpuSample, GpuSample];
    const other = { ...slice, uuid: 'MIG-other', name: 'H100 MIG 3g.40gb' };
    const monitor = mount({
      ...fixture(),
      gpus: [parent, slice, { ...slice, uuid: 'MIG-2' }, other],
    });
    expect(text(monitor, '.slice b')).toEqual(['MIG 1g.10gb #1', 'MIG 1g.10gb #2', 'MIG 3g.40gb']);
  });
});

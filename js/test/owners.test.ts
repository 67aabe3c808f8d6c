import { describe, expect, test, vi } from 'vitest';
import { groups, holders, split, views } from '../src/monitor/owners.js';
import type { GpuSample, ProcessSample } from '../src/snapshot.js';
import { all, at, BUSY, crowd, fixture, GIB, mount, one, text } from './stage.js';

describe('owners of memory', () => {
  const gpu = (more: Partial<GpuSample> = {}): GpuSample => ({
    ...at(fixture().gpus, BUSY),
    memory_total: 80 * GIB,
    memory_used: 40 * GIB,
    memory_reserved: GIB,
    ...more,
  });
  const process = (more: Partial<ProcessSample>): ProcessSample => ({
    ...at(fixture().processes, 0),
    mine: false,
    notebook: null,
    kernel: null,
    idle_since: null,
    utilization: null,
    memory: 10 * GIB,
    ...more,
  });

  const parts = (gpu: GpuSample, processes: ProcessSample[], here: string | null) => {
    const held = holders({ ...fixture(), gpus: [gpu], processes });
    return split(gpu, held.get(gpu.uuid), here);
  };

  test('each holder has its owner, and the rest is the system’s', () => {
    const held = [
      process({ kernel: 'k1', notebook: 'a.ipynb' }),
      process({ kernel: 'k2', notebook: 'b.ipynb', memory: 5 * GIB }),
      process({ user: 'grace', name: null }),
      process({ kernel: 'k3', notebook: 'c.ipynb', orphan: true, memory: 2 * GIB }),
    ];
    expect(parts(gpu(), held, 'k1')).toEqual({
      own: 10 * GIB,
      ownOther: 5 * GIB,
      other: 10 * GIB,
      orphan: 2 * GIB,
      system: 14 * GIB,
      free: 39 * GIB,
      known: true,
    });
  });

  test('the parts never exceed the used memory', () => {
    const held = [process({ mine: true, memory: 90 * GIB }), process({ kernel: 'k2' })];
    const { own, ownOther, other } = parts(gpu(), held, null);
    expect([own, ownOther, other]).toEqual([40 * GIB, 0, 0]);
    expect(parts(gpu({ memory_used: null }), held, null).known).toBe(false);
  });

  test('workers are grouped with their notebook, other users’ processes by user', () => {
    const found = groups(
      [
        process({ pid: 2, kernel: 'k1', notebook: 'a.ipynb', child: true, memory: GIB }),
        process({ pid: 1, kernel: 'k1', notebook: 'a.ipynb' }),
        process({ pid: 3, user: 'grace', name: null, memory: 20 * GIB }),
        process({ pid: 4, user: 'grace', name: null, memory: null }),
        process({ pid: 5, kernel: 'dead', orphan: true }),
      ],
      'k1',
    );
    expect(found.map(({ main, memory }) => [main.pid, (memory ?? 0) / GIB])).toEqual([
      [1, 11],
      [3, 20],
      [5, 10],
    ]);
  });

  test('memory that no visible process holds has a row', () => {
    const snapshot = { ...fixture(), gpus: [gpu()], processes: [] };
    expect(at(views(snapshot, null), 0).system).toBe(41 * GIB);
    expect(text(mount(snapshot), 'li.process')).toEqual(['system41.0 GiB']);
    // Some memory reserved by the driver is normal.
    const normal = gpu({ memory_used: GIB / 4, memory_reserved: GIB / 2 });
    expect(text(mount({ ...snapshot, gpus: [normal] }), 'li.process')).toEqual([]);
    const small = gpu({ memory_total: 8 * GIB, memory_used: GIB / 4, memory_reserved: 0 });
    expect(text(mount({ ...snapshot, gpus: [small] }), 'li.process')).toEqual(['system256 MiB']);
  });

  test('only possible actions have buttons', () => {
    const actions = { goTo: vi.fn(), interrupt: vi.fn(), shutDown: vi.fn(), terminate: vi.fn() };
    const snapshot = { ...fixture(), gpus: [gpu()] };
    snapshot.processes = [
      process({ pid: 1, kernel: 'k1', notebook: 'a.ipynb', memory: 5 * GIB }),
      process({ pid: 2, kernel: 'k2', notebook: 'b.ipynb', server: 'process 42', memory: 4 * GIB }),
      process({ pid: 3, kernel: 'k3', orphan: true, memory: 3 * GIB }),
      process({ pid: 4, name: 'tritonserver', memory: 2 * GIB }),
    ];
    const monitor = mount(snapshot, actions);
    const buttons = all(monitor, 'li.process').map((row) => [
      ...row.querySelectorAll<HTMLButtonElement>('.acts:not([hidden]) button:not([hidden])'),
    ]);
    expect(buttons.map((row) => row.map((button) => button.ariaLabel))).toEqual([
      [
        'Go to the notebook: a.ipynb',
        'Interrupt the kernel: a.ipynb',
        'Shut down the kernel: a.ipynb',
      ],
      [],
      ['End orphaned process: python3 (PID 3)'],
      [],
      [],
    ]);
    for (const button of buttons.flat()) button.click();
    expect(actions.shutDown.mock.calls[0]?.[0].pid).toBe(1);
    expect(actions.terminate.mock.calls[0]?.[0].pid).toBe(3);
    expect(all(mount(snapshot), '.process button')).toEqual([]);
  });

  test('an idle notebook’s row shows for how long', () => {
    const snapshot = { ...fixture(), gpus: [gpu()] };
    const idle = (pid: number, s: number): ProcessSample =>
      process({ pid, kernel: `k${pid}`, notebook: `${pid}.ipynb`, idle_since: snapshot.time - s });
    snapshot.processes = [idle(1, 760), idle(2, 5)];
    expect(text(mount(snapshot), '.process .note:not([hidden])')).toEqual([
      'cuda:0 · idle 12 min',
      'cuda:0 · idle',
    ]);
  });

  test('a holder’s row shows how busy it keeps the GPU, also another user’s', () => {
    const snapshot = { ...fixture(), gpus: [gpu()] };
    snapshot.processes = [
      process({ pid: 1, name: null, user: 'grace', utilization: 36.6 }),
      process({ pid: 2, utilization: 0 }),
    ];
    const monitor = mount(snapshot);
    expect(text(monitor, '.process .note:not([hidden])')).toEqual([
      'cuda:0 · PID 2',
      'cuda:0 · busy 37 %',
    ]);
  });
});

describe('many GPUs', () => {
  test('up to three GPUs are open; more are closed until clicked', () => {
    expect(all(mount(crowd(3)), '.opened')).toHaveLength(3);
    const monitor = mount(crowd(4));
    expect(all(monitor, '.gpu')).toHaveLength(4);
    expect(all(monitor, '.opened, canvas')).toEqual([]);
    one(monitor, '.gpu button').click();
    monitor.draw();
    expect(all(monitor, 'canvas')).toHaveLength(2);
    expect(one(monitor, '.gpu button').ariaExpanded).toBe('true');
  });

  test('a holder has one row for all its GPUs', () => {
    const snapshot = crowd(9);
    const model = at(fixture().processes, 0);
    snapshot.processes = snapshot.gpus.map(({ uuid }) => ({ ...model, uuid, memory: GIB }));
    const row = one(mount(snapshot), 'li.process').textContent;
    expect(row).toContain('train.ipynb');
    expect(row).toContain('9 GPUs');
    expect(row).toContain('9.0 GiB');
  });
});

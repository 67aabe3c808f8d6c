import { beforeEach, describe, expect, test, vi } from 'vitest';
import { type Alert, AlertPoll, Alerts } from '../src/lab/alerts.js';
import { Stream } from '../src/lab/stream.js';
import { english } from '../src/monitor/shared.js';
import type { KernelSample, Snapshot } from '../src/snapshot.js';
import { FakeEnvironment, limits } from './environment.js';
import { all, at, GIB, mount, one, text, whole } from './stage.js';

beforeEach(() => localStorage.clear());

const noGpu = (more: Partial<Snapshot> = {}): Snapshot => ({
  ...{ ...whole(), gpus: [], processes: [], problems: [] },
  ...more,
});
const sample = (more: Partial<KernelSample>): KernelSample => ({
  ...{ ...at(whole().kernels, 0), growth: 0, idle_since: 0 },
  ...more,
});
const host = (used: number) => ({
  ...whole().host,
  memory_limit: 10 * GIB,
  limit_used: used * GIB,
});

describe('the table of notebooks', () => {
  test('has the CPU and RAM of each kernel, and one row for a kernel with a GPU', () => {
    const monitor = mount({ ...whole(), events: [] });
    monitor.set({ here: at(whole().kernels, 0).kernel });
    monitor.draw();
    const rows = text(monitor, 'li.process');
    expect(rows[0]).toMatch(/^train\.ipynb101 %4\.1 GiB10\.0 GiB.*idle/);
    expect(rows.filter((row) => row.startsWith('train.ipynb'))).toHaveLength(1);
    expect(rows.find((row) => row.startsWith('notes'))).toBe('notes.ipynb0 %205 MiBidle 42 min');
    expect(text(monitor, '.titles *')).toEqual(['Notebooks', 'CPU', 'RAM', 'GPU']);
  });

  test('is shown without a GPU too, with its buttons', () => {
    const shutDown = vi.fn();
    const monitor = mount(noGpu(), { shutDown });
    expect(one(monitor, '.notebooks').hidden).toBe(false);
    expect(text(monitor, 'li.process .who')).toEqual(['train.ipynb', 'notes.ipynb']);
    at(all(monitor, 'li.process button:not([hidden])'), 0).click();
    expect(shutDown.mock.calls[0]?.[0]).toMatchObject({ kernel: at(whole().kernels, 0).kernel });
    expect(one(mount(noGpu({ kernels: [] })), '.notebooks').hidden).toBe(true);
  });

  test('shows unknown readings as N/A, and folds many kernels', () => {
    const some = [...Array(12).keys()].map((n) => sample({ kernel: `k${n}`, cpu: null }));
    const monitor = mount(noGpu({ kernels: some }));
    expect(text(monitor, 'li.process')).toHaveLength(8);
    expect(one(monitor, 'li.process .size').textContent).toBe('N/A');
    const more = one(monitor, '.notebooks .more');
    expect(more.textContent).toBe('and 4 more');
    more.click();
    monitor.draw();
    expect(text(monitor, 'li.process')).toHaveLength(12);
  });

  test('from 90 % of the limit on, the meter is orange and the fastest row shows the time left', () => {
    const kernels = [
      sample({ kernel: 'a', notebook: 'slow.ipynb', growth: 1e6 }),
      sample({ kernel: 'b', notebook: 'fast.ipynb', growth: 0.4 * GIB }),
    ];
    const monitor = mount(noGpu({ kernels, host: host(8.9) }));
    expect(text(monitor, '.meter.warn')).toEqual([]);
    expect(text(monitor, '.note.warn')).toEqual([]);
    monitor.update(noGpu({ kernels, host: host(9.2), time: whole().time + 1 }));
    monitor.draw();
    expect(text(monitor, '.meter.warn')).toContain('RAM9.2/10 GiB');
    expect(text(monitor, '.note.warn')).toEqual([
      expect.stringContaining('+410 MiB/s · full in ~2 s'),
    ]);
  });
});

describe('a kernel that died', () => {
  test('has a card until it is dismissed', () => {
    const goToCell = vi.fn();
    const monitor = mount(noGpu(), { goToCell });
    const card = one(monitor, '.death').textContent;
    expect(card).toContain('killed by the out-of-memory killer while In [7] ran · ');
    expect(card).toContain('variables are lost');
    expect(card).toContain('more RAM');
    const [go, close] = all(monitor, '.death button');
    expect(go?.textContent).toBe('Go to In [7]');
    go?.click();
    expect(goToCell.mock.calls[0]?.[0]).toMatchObject({ notebook: 'notes.ipynb', count: 7 });
    close?.click();
    monitor.draw();
    expect(all(monitor, '.death')).toEqual([]);
    // Also in a page that is loaded again.
    expect(all(mount(noGpu()), '.death')).toEqual([]);
  });

  test('alerts once per browser, also if it died before the page was opened', () => {
    const alerts = () => new Alerts(limits(), english).update(noGpu());
    expect(alerts()).toMatchObject([{ kind: 'fault', place: { count: 7 } }]);
    expect(alerts()).toEqual([]);
    localStorage.clear();
    expect(new Alerts(limits({ faultAlert: false }), english).update(noGpu())).toEqual([]);
  });
});

describe('the cell that fills the RAM', () => {
  const interrupted = (on: boolean, ...used: number[]) => {
    const stream = new Stream(new FakeEnvironment());
    const alerts = new Alerts(limits({ ramInterrupt: on }), english);
    const stopped: (string | null)[] = [];
    const none = (_: Alert) => {};
    new AlertPoll(
      alerts,
      stream,
      new FakeEnvironment(),
      none,
      () => {},
      (it) => stopped.push(it.notebook),
    );
    const kernels = [
      sample({ kernel: 'a', notebook: 'idle.ipynb', growth: 9e9 }),
      sample({ kernel: 'b', notebook: 'busy.ipynb', growth: 1e9, idle_since: null }),
    ];
    used.forEach((one, n) => {
      stream.show(noGpu({ kernels, host: host(one), time: n, events: [] }));
    });
    return stopped;
  };

  test('is interrupted at 97 %, once until there is room again, if the user wants it', () => {
    expect(interrupted(false, 9.8)).toEqual([]);
    expect(interrupted(true, 9.5, 9.6)).toEqual([]);
    expect(interrupted(true, 9.8, 9.9, 9.8)).toEqual(['busy.ipynb']);
    expect(interrupted(true, 9.8, 8, 9.8)).toEqual(['busy.ipynb', 'busy.ipynb']);
  });
});

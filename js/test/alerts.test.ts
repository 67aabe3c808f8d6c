import { beforeEach, describe, expect, it } from 'vitest';
import fixture from '../../tests/data/snapshot.json';
import { Alerts } from '../src/lab/alerts.js';
import { english } from '../src/monitor/shared.js';
import type { GpuSample, ProcessSample, Snapshot } from '../src/snapshot.js';
import { limits } from './environment.js';

const GIB = 2 ** 30;
const FIXTURE: Snapshot = fixture;
const [COOL] = FIXTURE.gpus as [GpuSample];
const [KERNEL] = FIXTURE.processes as [ProcessSample];

let alerts: Alerts;
let time: number;

beforeEach(() => {
  alerts = new Alerts(limits(), english);
  time = 1e9;
  use(COOL.uuid);
});

/** A notebook of mine holds memory on this GPU, or on none. */
function use(...uuids: string[]): void {
  const elsewhere = { ...KERNEL, kernel: null, notebook: null, uuid: 'elsewhere' };
  const held = uuids.map((uuid) => ({ ...KERNEL, idle_since: null, uuid }));
  const quiet = { driver: null, gpus: [], problems: [], time };
  alerts.update({ ...FIXTURE, ...quiet, processes: [...held, elsewhere] });
}

/** Return the alerts of some seconds with this GPU and one snapshot each second. */
function during(seconds: number, gpu: Partial<GpuSample>, rest: Partial<Snapshot> = {}): string[] {
  const found: string[] = [];
  for (let n = 0; n < seconds; n++) {
    time++;
    const gpus = [{ ...COOL, ...gpu }];
    const snapshot = { ...FIXTURE, processes: [], problems: [], gpus, time, ...rest };
    found.push(...alerts.update(snapshot).map((alert) => alert.text));
  }
  return found;
}

const FULL = { memory_used: 79 * GIB, memory_reserved: 0 };

describe('memory', () => {
  it('alerts once when it has been nearly full for some time', () => {
    expect(during(10, FULL)).toEqual([]);
    expect(during(1, FULL)).toEqual(['GPU 0: memory is nearly full, 79.0 GiB of 80.0 GiB.']);
    expect(during(1000, FULL)).toEqual([]);
  });

  it('does not alert about a peak', () => {
    for (let n = 0; n < 20; n++) expect([...during(9, FULL), ...during(3, {})]).toEqual([]);
  });

  it('counts the driver’s reserved memory as used', () => {
    expect(during(20, { ...FULL, memory_used: 70 * GIB, memory_reserved: 9 * GIB })).toHaveLength(
      1,
    );
  });

  it('varying around the limit is one event; a new one needs a minute below it', () => {
    expect(during(11, FULL)).toHaveLength(1);
    for (let n = 0; n < 50; n++) {
      expect(during(5, { ...FULL, memory_used: 75.9 * GIB })).toEqual([]);
      expect(during(15, FULL)).toEqual([]);
    }
    expect(during(30, {})).toEqual([]);
    expect(during(30, FULL)).toEqual([]);
    expect(during(62, {})).toEqual([]);
    expect(during(11, FULL)).toHaveLength(1);
  });

  it('keeps its state while memory is unknown', () => {
    expect(during(11, FULL)).toHaveLength(1);
    expect(during(100, { memory_used: null })).toEqual([]);
    expect(during(20, FULL)).toEqual([]);
  });

  it('must be full for some time again after a pause', () => {
    during(5, FULL);
    time += 10_000;
    expect(during(10, FULL)).toEqual([]);
    expect(during(1, FULL)).toHaveLength(1);
  });

  it('uses the limits of the settings', () => {
    alerts.limits = limits({ memoryPercent: 50, memorySeconds: 0 });
    expect(during(1, { memory_used: 41 * GIB })).toHaveLength(1);
    alerts = new Alerts(limits({ memoryAlert: false }), english);
    expect(during(100, FULL)).toEqual([]);
  });

  it('works if the clock is set back', () => {
    during(11, FULL);
    time -= 5000;
    expect(during(50, FULL)).toEqual([]);
    during(70, {});
    expect(during(20, FULL)).toHaveLength(1);
  });
});

it.each([FULL, { temperature: 87 }, { lost: true }, { xid: 79, xid_time: 1e9 }])(
  '%o alerts only about GPUs that my notebooks use',
  (wrong) => {
    use();
    expect(during(100, wrong)).toEqual([]);
    use(COOL.uuid);
    expect(during(1, wrong)).toHaveLength(1);
  },
);

describe('heat', () => {
  it('alerts at the temperature limit, after some time', () => {
    expect(during(30, { temperature: 87 })).toEqual([]);
    expect(during(1, { temperature: 87 })).toEqual(['GPU 0 is at its temperature limit: 87 °C.']);
  });

  it.each(['hardware slowdown', 'software thermal slowdown', 'power brake'])(
    'alerts about %s',
    (reason) => {
      const found = during(40, { throttle: ['power cap', reason] });
      expect(found).toEqual([`GPU 0 is throttled: 38 °C, ${reason}.`]);
    },
  );

  it('does not alert about the power cap, or if it is unknown', () => {
    expect(during(100, { throttle: ['power cap', 'sync boost'] })).toEqual([]);
    expect(during(100, { temperature: 99, temperature_limit: null, throttle: null })).toEqual([]);
    expect(during(100, { temperature: null, throttle: null })).toEqual([]);
  });
});

describe('an idle notebook', () => {
  const idle = (minutes: number, changes: Partial<ProcessSample> = {}) => ({
    processes: [{ ...KERNEL, idle_since: time - minutes * 60, uuid: COOL.uuid, ...changes }],
  });

  it('alerts once if it holds much memory, with its name', () => {
    expect(during(1, {}, idle(29))).toEqual([]);
    const text = 'work/train.ipynb holds 10.0 GiB on GPU 0 and has been idle for 30 min.';
    expect(during(1, {}, idle(30))).toEqual([text]);
    expect(during(100, {}, idle(31))).toEqual([]);
    expect(during(100, {})).toEqual([]);
    expect(during(100, {}, idle(36))).toEqual([]);
  });

  it('alerts again the next time', () => {
    during(1, {}, idle(30));
    expect(during(61, {}, idle(0))).toEqual([]);
    expect(during(1, {}, idle(31))).toHaveLength(1);
  });

  it('counts its workers, on all its GPUs', () => {
    const [main] = idle(40, { memory: GIB / 2 }).processes as [ProcessSample];
    const worker = { ...main, pid: 9, child: true, idle_since: null, uuid: 'GPU-x' };
    expect(during(1, {}, { processes: [worker, main] })).toEqual([
      'work/train.ipynb holds 1.0 GiB on GPU-x, GPU 0 and has been idle for 40 min.',
    ]);
  });

  it.each([
    { memory: GIB - 1 },
    { memory: null },
    { idle_since: null },
    { kernel: null },
    { orphan: true },
  ])('does not alert if %o', (changes) => {
    expect(during(1, {}, idle(60, changes))).toEqual([]);
  });
});

describe('a fault', () => {
  it('alerts at once, with its cure, once', () => {
    const problem = { code: 'gpu-lost', cause: 'it fell off', cure: 'see dmesg', uuid: COOL.uuid };
    const lost = { lost: true, memory_used: null, temperature: null, throttle: null };
    expect(during(50, lost, { problems: [problem] })).toEqual(['GPU 0 is lost: see dmesg.']);
    expect(during(61, {})).toEqual([]);
    expect(during(50, lost)).toEqual(['GPU 0 is lost.']);
  });

  it('that is over is listed, so that its notification is dismissed', () => {
    during(2, { lost: true });
    expect(alerts.over).not.toContain(`lost ${COOL.uuid}`);
    during(1, {});
    expect(alerts.over).toContain(`lost ${COOL.uuid}`);
  });

  it('includes a driver that was there and is gone', () => {
    const problem = { code: 'x', cause: 'the driver is not loaded', cure: 'load it', uuid: null };
    const gone = { driver: null, gpus: [], problems: [problem] };
    // A machine that never had one.
    expect(during(20, {}, gone)).toEqual([]);
    during(1, {});
    expect(during(4, {}, gone)).toEqual([]);
    expect(during(20, {}, gone)).toEqual(['The driver is gone: the driver is not loaded.']);
    during(1, {});
    expect(alerts.over).toContain('driver');
  });

  it('each new Xid alerts, and an old one does not', () => {
    expect(during(50, { xid: 79, xid_time: time - 5 })).toEqual([
      'GPU 0 had a critical error, Xid 79: see dmesg.',
    ]);
    expect(during(50, { xid: 79, xid_time: time + 1 })).toHaveLength(1);
    expect(during(50, { xid: 31, xid_time: time - 4000 })).toEqual([]);
  });
});

it('random snapshots never alert twice in a minute about the same event', () => {
  let seed = 7;
  const random = () => {
    seed = (seed * 1103515245 + 12345) % 2 ** 31;
    return seed / 2 ** 31;
  };
  const pick = <T>(...values: T[]) => values[Math.floor(random() * values.length)] as T;
  const last = new Map<string, number>();
  for (let n = 0; n < 20_000; n++) {
    time += pick(0.25, 1, 1, 5, 60);
    const gpu = {
      ...COOL,
      lost: random() < 0.05,
      memory_used: pick(null, 10 * GIB, 76 * GIB, 79 * GIB, 80 * GIB),
      temperature: pick(null, 30, 86, 87, 95),
      throttle: pick(null, [], ['power cap'], ['hardware thermal slowdown']),
    };
    const idle_since = pick(null, time - 1, time - 3600);
    const processes = pick([], [{ ...KERNEL, uuid: COOL.uuid, idle_since }]);
    const snapshot = { ...FIXTURE, problems: [], gpus: pick([gpu], [gpu], []), processes, time };
    for (const { key } of alerts.update(snapshot)) {
      expect(time - (last.get(key) ?? 0)).toBeGreaterThan(60);
      last.set(key, time);
    }
  }
  expect([...last.keys()].map((key) => key.split(' ')[0]).sort()).toEqual([
    'heat',
    'idle',
    'lost',
    'memory',
  ]);
});

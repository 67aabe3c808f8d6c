import { expect, test } from 'vitest';
import { gap, Past } from '../src/monitor/past.js';
import { age, lasted, reading, size, watts } from '../src/monitor/units.js';
import type { GpuHistory, Snapshot } from '../src/snapshot.js';

const at = (time: number, utilization: number | null, more: object = {}): Snapshot =>
  ({
    time,
    gpus: [{ uuid: 'a', utilization, memory_used: 1, power: null, age: 0, ...more }],
    processes: [],
  }) as never;

const columns = (more: Partial<GpuHistory>): GpuHistory => ({
  ...{ utilization: [], memory_used: [], power: [], held: {} },
  ...more,
});

test('a history replaces the samples of its time span only', () => {
  const past = new Past();
  for (const time of [8, 10, 11]) past.push(at(time, time));
  past.seed({
    time: [9, 10],
    gpus: { a: columns({ utilization: [1, null], memory_used: [5, 6] }) },
  });
  expect(past.time).toEqual([8, 9, 10, 11]);
  expect(past.values('a', 'utilization')).toEqual([8, 1, Number.NaN, 11]);
  expect(past.values('a', 'memory')).toEqual([1, 5, 6, 1]);
  past.seed({ time: [], gpus: {} });
  expect(past.time).toHaveLength(4);
});

test('a GPU’s values are unknown before it appears and after it is gone', () => {
  const past = new Past();
  past.push(at(1, 1, { uuid: 'b' }));
  past.push(at(2, 2));
  expect(past.values('a', 'utilization')).toEqual([Number.NaN, 2]);
  expect(past.values('b', 'utilization')).toEqual([1, Number.NaN]);
});

test('old snapshots and old values are left out', () => {
  const past = new Past();
  past.push(at(2, 50));
  past.push(at(1, 60));
  past.push(at(2, 70));
  past.push(at(3, 80, { age: 4 }));
  past.push(at(4, 90, { lost: true }));
  expect(past.time).toEqual([2, 3, 4]);
  expect(past.values('a', 'utilization')).toEqual([50, Number.NaN, Number.NaN]);
});

test('the oldest samples are dropped', () => {
  const past = new Past();
  for (let time = 0; time < 5000; time++) past.push(at(time, time));
  expect(past.time.length).toBeLessThanOrEqual(1600);
  expect(past.values('a', 'utilization').at(-1)).toBe(4999);
  expect(past.values('a', 'utilization')).toHaveLength(past.time.length);
});

test('an hour at any period is stored, with its peaks and means', () => {
  const past = new Past();
  past.step = 3600 / 800;
  for (let time = 1; time <= 4 * 3600; time++)
    past.push(at(time / 4, time <= 7200 ? 100 : 0, { memory_used: time === 5000 ? 9 : 1 }));
  expect(past.time[0]).toBeLessThan(60);
  expect(past.time.length).toBeLessThanOrEqual(1600);
  const { peak, mean } = past.stats('a', past.time[0] as number, 3600);
  expect(peak).toBe(9);
  expect(mean).toBeCloseTo(50, 0);
});

test('a cell that began with a sample does not get the time before', () => {
  const past = new Past();
  for (const time of [1, 2, 3, 4]) past.push(at(time, time === 3 ? 90 : 0));
  expect(past.stats('a', 2, 3).mean).toBe(90);
  expect(past.stats('a', 1.99, 2.2).mean).toBeNull();
  expect(past.stats('a', 2.3, 3.2).mean).toBe(90);
});

test('charts go on after the clock was set back', () => {
  const past = new Past();
  for (const time of [1000, 1001, 1002, 5000, 5001]) past.push(at(time, 1));
  past.push(at(4990, 2));
  expect(past.time.at(-1)).toBe(5001);
  past.push(at(1001.5, 3));
  expect(past.time).toEqual([1000, 1001, 1001.5]);
  expect(past.values('a', 'utilization')).toEqual([1, 1, 3]);
});

test('runs are in the order of their start, whenever they arrive', () => {
  const past = new Past();
  const run = (id: string, start: number) => ({
    ...{ id, start, end: start + 1, kernel: null, notebook: null, count: 1, gpus: ['a'] },
  });
  past.mark([run('late', 50)], 60);
  past.mark([run('early', 10), run('middle', 30)], 60);
  expect(past.runs('a').map(({ id }) => id)).toEqual(['early', 'middle', 'late']);
  past.mark([], 3000);
  expect(past.runs('a')).toHaveLength(3);
  past.mark([], 5000);
  expect(past.runs('a')).toHaveLength(0);
});

test('statistics use the samples within the time span', () => {
  const past = new Past();
  for (const time of [1, 2, 3, 4]) past.push(at(time, time * 10, { memory_used: time }));
  // The sample at 2 covers the second before.
  expect(past.stats('a', 2, 3)).toEqual({ peak: 3, mean: 30 });
  expect(past.stats('a', 1, 3)).toEqual({ peak: 3, mean: 25 });
  expect(past.stats('a', 2.2, 2.8)).toEqual({ peak: null, mean: 30 });
  expect(past.stats('a', 2.2, 2.4)).toEqual({ peak: null, mean: null });
});

test.each([
  [[1, 2, 3], 2, false],
  [[1, 2, 30, 31], 2, true],
  [[0, 60, 120], 2, false],
  [[1, 2, 62, 122], 2, false],
  [[0], 0, true],
])('of %j, number %i comes after a gap: %s', (time, n, expected) => {
  expect(gap(time, n)).toBe(expected);
});

test('units are the same as in the tables of %gpus', () => {
  expect([null, 80, 1023.6 * 1024, 1.25 * 2 ** 30, 100 * 2 ** 30].map(size)).toEqual([
    'N/A',
    '80 B',
    '1.0 MiB',
    '1.3 GiB',
    '100 GiB',
  ]);
  expect([3, 490, 7500, 399600].map(age)).toEqual(['3 s', '8 min', '2 h 5 min', '4 d 15 h']);
  expect([0.21, 12.4, 125, 7500].map(lasted)).toEqual(['0.2 s', '12 s', '2 min', '2 h 5 min']);
  expect([reading(null, '%'), watts(12.3, null), watts(null, 5)]).toEqual(['N/A', '12 W', 'N/A']);
});

test('owners of memory stay known for a minute after the last request', () => {
  const past = new Past();
  const holds = (time: number, kernel: string | null) => {
    const processes = kernel ? [{ uuid: 'a', kernel, memory: 5, orphan: false, mine: false }] : [];
    past.push({ ...at(time, 1), processes } as never);
  };
  holds(1, 'k1');
  holds(2, null);
  holds(3, 'k2');
  holds(70, null);
  expect(past.parts('a', 'k1')).toEqual(
    new Map([
      ['own', [5, 5, 0, 0]],
      ['ownOther', [0, 0, 5, 0]],
    ]),
  );
  past.seed({
    time: [1, 2],
    gpus: { a: columns({ utilization: [1, 1], memory_used: [9, 9], held: { left: [7, null] } }) },
  });
  expect(past.parts('a', 'k1').get('orphan')).toEqual([7, 7, 0, 0]);
});

test('merging two thousand cells takes less than 0.1 s', () => {
  const past = new Past();
  const gpus = ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'];
  const cells = Array.from({ length: 2000 }, (_, n) => ({
    ...{ id: `${n}`, kernel: 'k', notebook: null, count: n, gpus },
    ...{ start: 2000 - n, end: 2000.5 - n },
  }));
  const began = performance.now();
  past.mark(cells, 2000);
  expect(performance.now() - began).toBeLessThan(100);
  expect(past.runs('h').map(({ count }) => count)).toEqual(
    cells.map(({ count }) => count).reverse(),
  );
});

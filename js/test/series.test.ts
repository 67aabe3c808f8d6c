import { expect, test } from 'vitest';
import { gap, Runs, Series } from '../src/monitor/series.js';
import { age, lasted, reading, size, watts } from '../src/monitor/units.js';
import type { Past, Snapshot } from '../src/snapshot.js';

const at = (time: number, utilization: number | null, more: object = {}): Snapshot =>
  ({
    time,
    gpus: [{ uuid: 'a', utilization, memory_used: 1, power: null, age: 0, ...more }],
    processes: [],
  }) as never;

const past = (columns: Partial<Past>): Past => ({
  ...{ utilization: [], memory_used: [], power: [], held: {} },
  ...columns,
});

test('a history fills the past and leaves what is newer', () => {
  const series = new Series();
  for (const time of [8, 10, 11]) series.push(at(time, time));
  series.seed({
    time: [9, 10],
    gpus: { a: past({ utilization: [1, null], memory_used: [5, 6] }) },
  });
  expect(series.time).toEqual([8, 9, 10, 11]);
  expect(series.values('a', 'utilization')).toEqual([8, 1, Number.NaN, 11]);
  expect(series.values('a', 'memory')).toEqual([1, 5, 6, 1]);
  series.seed({ time: [], gpus: {} });
  expect(series.time).toHaveLength(4);
});

test('a GPU that comes late has nothing to say of the time before', () => {
  const series = new Series();
  series.push(at(1, 1, { uuid: 'b' }));
  series.push(at(2, 2));
  expect(series.values('a', 'utilization')).toEqual([Number.NaN, 2]);
  expect(series.values('b', 'utilization')).toEqual([1, Number.NaN]);
});

test('old values and old snapshots are not those of now', () => {
  const series = new Series();
  series.push(at(2, 50));
  series.push(at(1, 60));
  series.push(at(2, 70));
  series.push(at(3, 80, { age: 4 }));
  series.push(at(4, 90, { lost: true }));
  expect(series.time).toEqual([2, 3, 4]);
  expect(series.values('a', 'utilization')).toEqual([50, Number.NaN, Number.NaN]);
});

test('it does not grow for ever', () => {
  const series = new Series();
  for (let time = 0; time < 5000; time++) series.push(at(time, time));
  expect(series.time.length).toBeLessThanOrEqual(1600);
  expect(series.values('a', 'utilization').at(-1)).toBe(4999);
  expect(series.values('a', 'utilization')).toHaveLength(series.time.length);
});

test('an hour at any period is kept, with its peaks and means', () => {
  const series = new Series();
  series.step = 3600 / 800;
  for (let time = 1; time <= 4 * 3600; time++)
    series.push(at(time / 4, time <= 7200 ? 100 : 0, { memory_used: time === 5000 ? 9 : 1 }));
  expect(series.time[0]).toBeLessThan(60);
  expect(series.time.length).toBeLessThanOrEqual(1600);
  const { peak, mean } = series.stats('a', series.time[0] as number, 3600);
  expect(peak).toBe(9);
  expect(mean).toBeCloseTo(50, 0);
});

test('a cell that began with a sample has nothing of the time before', () => {
  const series = new Series();
  for (const time of [1, 2, 3, 4]) series.push(at(time, time === 3 ? 90 : 0));
  expect(series.stats('a', 2, 3).mean).toBe(90);
  expect(series.stats('a', 1.99, 2.2).mean).toBeNull();
  expect(series.stats('a', 2.3, 3.2).mean).toBe(90);
});

test('a clock that is set back does not stop the charts', () => {
  const series = new Series();
  for (const time of [1000, 1001, 1002, 5000, 5001]) series.push(at(time, 1));
  series.push(at(4990, 2));
  expect(series.time.at(-1)).toBe(5001);
  series.push(at(1001.5, 3));
  expect(series.time).toEqual([1000, 1001, 1001.5]);
  expect(series.values('a', 'utilization')).toEqual([1, 1, 3]);
});

test('runs stand in the order in which they began, however they are told', () => {
  const runs = new Runs();
  const run = (id: string, start: number) => ({
    ...{ id, start, end: start + 1, kernel: null, notebook: null, count: 1, gpus: ['a'] },
  });
  runs.merge([run('late', 50)], 60);
  runs.merge([run('early', 10), run('middle', 30)], 60);
  expect(runs.of('a').map(({ id }) => id)).toEqual(['early', 'middle', 'late']);
  runs.merge([], 3000);
  expect(runs.of('a')).toHaveLength(3);
  runs.merge([], 5000);
  expect(runs.of('a')).toHaveLength(0);
});

test('statistics are of the samples within', () => {
  const series = new Series();
  for (const time of [1, 2, 3, 4]) series.push(at(time, time * 10, { memory_used: time }));
  // The sample at 2 is of the second before.
  expect(series.stats('a', 2, 3)).toEqual({ peak: 3, mean: 30 });
  expect(series.stats('a', 1, 3)).toEqual({ peak: 3, mean: 25 });
  expect(series.stats('a', 2.2, 2.8)).toEqual({ peak: null, mean: 30 });
  expect(series.stats('a', 2.2, 2.4)).toEqual({ peak: null, mean: null });
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

test('units are those of the table', () => {
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

test('who holds memory is known until nobody has asked for a while', () => {
  const series = new Series();
  const holds = (time: number, kernel: string | null) => {
    const processes = kernel ? [{ uuid: 'a', kernel, memory: 5, orphan: false, mine: false }] : [];
    series.push({ ...at(time, 1), processes } as never);
  };
  holds(1, 'k1');
  holds(2, null);
  holds(3, 'k2');
  holds(20, null);
  const held = new Map(series.held('a'));
  expect(held.get('k1')).toEqual([5, 5, 0, Number.NaN]);
  expect(held.get('k2')).toEqual([Number.NaN, Number.NaN, 5, Number.NaN]);
  series.seed({
    time: [1, 2],
    gpus: { a: past({ utilization: [1, 1], memory_used: [9, 9], held: { left: [7, null] } }) },
  });
  const told = new Map(series.held('a'));
  expect(told.get('left')).toEqual([7, 7, 7, Number.NaN]);
  expect(told.get('k1')?.[0]).toBe(5);
});

test('the cells of a day are merged before the eye sees it', () => {
  const runs = new Runs();
  const gpus = ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'];
  const cells = Array.from({ length: 2000 }, (_, n) => ({
    ...{ id: `${n}`, kernel: 'k', notebook: null, count: n, gpus },
    ...{ start: 2000 - n, end: 2000.5 - n },
  }));
  const began = performance.now();
  runs.merge(cells, 2000);
  expect(performance.now() - began).toBeLessThan(100);
  expect(runs.of('h').map(({ count }) => count)).toEqual(cells.map(({ count }) => count).reverse());
});

import { expect, test } from 'vitest';
import type { Monitor } from '../src/monitor/monitor.js';
import { create } from '../src/panel.js';
import { all, at, crowd, mount, one, text } from './stage.js';

function page(count: number): Monitor {
  const monitor = create({}, true);
  document.body.append(monitor.node);
  const snapshot = crowd(count);
  for (const gpu of snapshot.gpus) gpu.ordinal = gpu.index;
  monitor.update({ ...snapshot, time: snapshot.time - 1 });
  monitor.update(snapshot);
  monitor.draw();
  return monitor;
}
const key = (monitor: Monitor, name: string): void => {
  one(monitor, '.over canvas').dispatchEvent(new KeyboardEvent('keydown', { key: name }));
};
const tip = (monitor: Monitor): string[] => text(monitor, '.tip:not([hidden]) > div');

test('each known metric has one chart of all GPUs', () => {
  const monitor = page(3);
  expect(text(monitor, '.over:not([hidden]) h2')).toEqual(['Utilization', 'Memory', 'Power']);
  expect(text(monitor, '.keys li')).toEqual(['cuda:0', 'cuda:1', 'cuda:2']);
  expect(all(mount(crowd(3)), '.over')).toEqual([]);
});

test('a GPU has the color of its CUDA ordinal, and no two share one', () => {
  const monitor = page(3);
  const first = all(monitor, '.keys .dot').map((dot) => dot.style.background);
  const snapshot = crowd(4);
  [3, null, 0, 0].forEach((ordinal, n) => {
    at(snapshot.gpus, n).ordinal = ordinal;
  });
  monitor.update(snapshot);
  monitor.draw();
  const dots = all(monitor, '.keys .dot').map((dot) => dot.style.background);
  const [three, one, zero, two] = dots;
  expect(new Set(dots).size).toBe(4);
  expect([zero, one, two]).toEqual(first);
  expect(three).not.toBe('');
});

test('the arrow keys read the values', () => {
  const monitor = page(3);
  key(monitor, 'ArrowRight');
  expect(tip(monitor)).toEqual(['0 s ago', 'cuda:0 97 %', 'cuda:1 97 %', 'cuda:2 97 %']);
  expect(one(monitor, '.tip').ariaLive).toBe('polite');
  key(monitor, 'Escape');
  expect(tip(monitor)).toEqual([]);
});

test('many GPUs are rows, and the arrow keys select one', () => {
  const monitor = page(20);
  expect(one(monitor, '.scale').textContent).toContain('cuda:0 to cuda:19');
  expect(one(monitor, '.keys').hidden).toBe(true);
  key(monitor, 'ArrowDown');
  expect(at(tip(monitor), 1)).toBe('cuda:1 97 %');
  key(monitor, 'ArrowDown');
  expect(at(tip(monitor), 1)).toBe('cuda:2 97 %');
});

import { expect, test, vi } from 'vitest';
import type { Want } from '../src/lab/audience.js';
import { Feeds } from '../src/lab/feeds.js';
import { Monitor } from '../src/monitor/monitor.js';
import { all, at, crowd, fixture, mount, one, text } from './stage.js';

function page(count: number): Monitor {
  const monitor = new Monitor({ wide: true });
  document.body.append(monitor.node);
  const snapshot = crowd(count);
  for (const gpu of snapshot.gpus)
    [gpu.ordinal, gpu.nvlink_sent, gpu.nvlink_received] = [gpu.index, null, null];
  monitor.update({ ...snapshot, time: snapshot.time - 1 });
  monitor.update(snapshot);
  monitor.draw();
  return monitor;
}
const key = (monitor: Monitor, name: string): void => {
  one(monitor, '.over canvas').dispatchEvent(new KeyboardEvent('keydown', { key: name }));
};
const tip = (monitor: Monitor): string[] => text(monitor, '.tip:not([hidden]) > div');

test('all GPUs are in one chart for each thing that is known', () => {
  const monitor = page(3);
  expect(text(monitor, '.over:not([hidden]) h2')).toEqual([
    'Utilization',
    'Memory',
    'Power',
    'PCIe',
  ]);
  expect(text(monitor, '.keys li')).toEqual(['cuda:0', 'cuda:1', 'cuda:2']);
  expect(all(mount(crowd(3)), '.over')).toEqual([]);
});

test('a GPU has the color of its number in CUDA, and none has that of another', () => {
  const monitor = page(3);
  const snapshot = crowd(4);
  [3, null, 0, 0].forEach((ordinal, n) => {
    at(snapshot.gpus, n).ordinal = ordinal;
  });
  monitor.update(snapshot);
  monitor.draw();
  const colors = all(monitor, '.keys .dot').map((dot) => dot.className);
  expect(colors).toEqual(['dot line-3', 'dot line-1', 'dot line-0', 'dot line-2']);
});

test('the keyboard reads them', () => {
  const monitor = page(3);
  key(monitor, 'ArrowRight');
  expect(tip(monitor)).toEqual(['0 s ago', 'cuda:0 97 %', 'cuda:1 97 %', 'cuda:2 97 %']);
  expect(one(monitor, '.tip').ariaLive).toBe('polite');
  key(monitor, 'Escape');
  expect(tip(monitor)).toEqual([]);
});

test('of many there are rows, of which the arrows choose one', () => {
  const monitor = page(20);
  expect(one(monitor, '.scale').textContent).toContain('cuda:0 to cuda:19');
  expect(one(monitor, '.keys').hidden).toBe(true);
  key(monitor, 'ArrowDown');
  expect(at(tip(monitor), 1)).toBe('cuda:1 97 %');
  key(monitor, 'ArrowDown');
  expect(at(tip(monitor), 1)).toBe('cuda:2 97 %');
});

test('each monitor is fed while it is there, and wants something only while it is seen', async () => {
  const listeners = new Set<{ snapshot?: (snapshot: never) => void }>();
  const wants: (Want | null)[] = [];
  const stream = {
    subscribe(listener: { snapshot?: (snapshot: never) => void }) {
      listeners.add(listener);
      return {
        change: (want: Want | null) => wants.push(want),
        close: () => listeners.delete(listener),
      };
    },
  };
  const past = { history: { time: [1], gpus: {} }, cells: [] };
  const feeds = new Feeds(stream as never, async () => past);
  const names = ['update', 'seed', 'mark', 'connection', 'here', 'options', 'hosts'] as const;
  const monitor = Object.fromEntries(names.map((name) => [name, vi.fn()])) as Record<
    (typeof names)[number],
    ReturnType<typeof vi.fn>
  >;
  let seen = false;
  const host = { key: 'node-7', snapshot: fixture(), silent: 0 };
  feeds.here('k');
  feeds.hosts([host]);
  feeds.add(monitor as never, () => seen);
  expect(monitor.hosts).toHaveBeenCalledWith([host]);
  expect(feeds.seen).toBe(false);
  expect(monitor.here).toHaveBeenCalledWith('k');
  expect(wants).toEqual([null]);
  seen = true;
  expect(feeds.seen).toBe(true);
  feeds.options({ density: 'lines' }, 2);
  expect(wants.at(-1)).toEqual({ period: 2, processes: true, history: true });
  expect(monitor.options).toHaveBeenLastCalledWith({ density: 'lines' });
  for (const listener of listeners) listener.snapshot?.(fixture() as never);
  expect(monitor.update).toHaveBeenCalledOnce();
  await feeds.past(monitor as never);
  expect(monitor.seed).toHaveBeenCalledWith(past.history);
  feeds.remove(monitor as never);
  expect(listeners.size).toBe(0);
  await feeds.past(monitor as never);
  expect(monitor.seed).toHaveBeenCalledOnce();
});

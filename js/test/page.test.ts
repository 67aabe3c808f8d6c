import { expect, test, vi } from 'vitest';
import { Feeds } from '../src/lab/feeds.js';
import type { Monitor } from '../src/monitor/monitor.js';
import type { State } from '../src/monitor/shared.js';
import { create } from '../src/panel.js';
import type { Want } from '../src/snapshot.js';
import { all, at, crowd, fixture, mount, one, text } from './stage.js';

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

test('all GPUs are in one chart for each thing that is known', () => {
  const monitor = page(3);
  expect(text(monitor, '.over:not([hidden]) h2')).toEqual(['Utilization', 'Memory', 'Power']);
  expect(text(monitor, '.keys li')).toEqual(['cuda:0', 'cuda:1', 'cuda:2']);
  expect(all(mount(crowd(3)), '.over')).toEqual([]);
});

test('a GPU has the color of its number in CUDA, and none has that of another', () => {
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
  const feeds = new Feeds(stream as never, async () => past as never);
  const fake = () => {
    const state: Partial<State> = {};
    const set = (changes: Partial<State>) => void Object.assign(state, changes);
    return { state, set, update: vi.fn(), seed: vi.fn(), mark: vi.fn() };
  };
  const [monitor, second] = [fake(), fake()];
  let visible = false;
  const host = { key: 'node-7', snapshot: fixture(), silent: 0 };
  feeds.set({ here: 'k', hosts: [host] });
  feeds.add(monitor as never, () => visible);
  expect(monitor.state).toEqual({ here: 'k', hosts: [host] });
  expect(feeds.anyVisible).toBe(false);
  expect(wants).toEqual([null]);
  visible = true;
  expect(feeds.anyVisible).toBe(true);
  feeds.setPeriod(2);
  expect(wants.at(-1)).toEqual({ period: 2, processes: true, history: true });
  feeds.set({ window: 60 });
  expect(monitor.state.window).toBe(60);
  for (const listener of listeners) listener.snapshot?.(fixture() as never);
  expect(monitor.update).toHaveBeenCalledOnce();
  // The stream has delivered the past to the first one.
  feeds.add(second as never, () => true);
  await vi.waitFor(() => expect(second.seed).toHaveBeenCalledWith(past.history));
  expect(monitor.seed).not.toHaveBeenCalled();
  feeds.remove(monitor as never);
  feeds.remove(second as never);
  expect(listeners.size).toBe(0);
});

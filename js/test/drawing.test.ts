import { describe, expect, test } from 'vitest';
import type { Monitor } from '../src/monitor/monitor.js';
import type { CellRun } from '../src/snapshot.js';
import { all, at, BUSY, fixture, GIB, mount, one, root, screen, Watcher } from './stage.js';

describe('updates', () => {
  test('an unchanged snapshot changes nothing in the page', async () => {
    const monitor = mount();
    for (const button of all(monitor, '.more')) button.click();
    monitor.draw();
    const seen: MutationRecord[] = [];
    const observer = new MutationObserver((records) => seen.push(...records));
    const everything = { childList: true, attributes: true, characterData: true, subtree: true };
    observer.observe(root(monitor), everything);
    monitor.update(fixture());
    monitor.draw();
    await Promise.resolve();
    expect(seen).toEqual([]);
    const hotter = fixture();
    at(hotter.gpus, BUSY).utilization = 12;
    monitor.update(hotter);
    monitor.draw();
    await Promise.resolve();
    // In its line and at its chart.
    expect(seen.map((record) => record.type)).toEqual(['characterData', 'characterData']);
    observer.disconnect();
  });

  test('a GPU that disappears and comes back stays closed or open', () => {
    const monitor = mount();
    const button = at(all(monitor, '.open'), 1);
    button.click();
    monitor.update({ ...fixture(), gpus: fixture().gpus.slice(0, 2) });
    monitor.draw();
    expect(all(monitor, '.gpu')).toHaveLength(1);
    monitor.update(fixture());
    monitor.draw();
    const open = button.ariaExpanded;
    expect(at(all(monitor, '.open'), 1).ariaExpanded).toBe(open);
    expect(at(all(mount(), '.open'), 1).ariaExpanded).toBe(open);
  });

  test('nothing is drawn while the monitor is not on the screen', () => {
    const monitor = mount();
    const sight = Watcher.all.find(({ watched }) => watched.has(monitor.node)) as Watcher;
    sight.call([{ target: monitor.node, isIntersecting: false }]);
    screen.frames = [];
    monitor.update({ ...fixture(), time: fixture().time + 1 });
    expect(screen.frames).toEqual([]);
    screen.strokes = 0;
    sight.call([{ target: monitor.node, isIntersecting: true }]);
    for (const frame of screen.frames) frame();
    expect(screen.strokes).toBeGreaterThan(0);
  });

  test('a disposed monitor observes and draws nothing', () => {
    const monitor = mount();
    expect(Watcher.all.some(({ watched }) => watched.size > 0)).toBe(true);
    monitor.dispose();
    monitor.dispose();
    expect(Watcher.all.filter(({ watched }) => watched.size > 0)).toEqual([]);
    screen.frames = [];
    monitor.update(fixture());
    expect(screen.frames).toEqual([]);
    expect(monitor.node.isConnected).toBe(false);
  });
});

describe('marks of cells', () => {
  const { time, gpus } = fixture();
  const uuid = at(gpus, BUSY).uuid;
  const run: CellRun = {
    id: 'a',
    kernel: null,
    notebook: 'work/train.ipynb',
    count: 12,
    start: time - 60,
    end: time - 48,
    gpus: [uuid],
  };
  const marked = (): Monitor => {
    const monitor = mount();
    const seconds = Array.from({ length: 100 }, (_, n) => time - 100 + n);
    const inside = (t: number): boolean => t >= run.start && t <= (run.end as number);
    monitor.seed({
      time: seconds,
      gpus: {
        [uuid]: {
          utilization: seconds.map((t) => (inside(t) ? 87 : 3)),
          memory_used: seconds.map((t) => (inside(t) ? 34.2 * GIB : GIB)),
          ...{ power: [], held: {} },
        },
      },
    });
    monitor.mark([run]);
    monitor.draw();
    return monitor;
  };
  const tip = (monitor: Monitor): string | null =>
    one(monitor, '.tip').hidden ? null : one(monitor, '.tip').textContent;

  test('the keyboard selects a cell and describes it', () => {
    const monitor = marked();
    const canvases = all(monitor, 'canvas');
    expect(canvases.map((canvas) => canvas.tabIndex)).toEqual([-1, -1, 0, 0, -1, -1]);
    const canvas = at(canvases, 2);
    canvas.focus();
    expect(tip(monitor)).toBe('In [12] work/train.ipynb · 12 s · peak 34.2 GiB · mean 87 %');
    canvas.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }));
    expect(tip(monitor)).toBeNull();
  });

  test('the pointer describes cells and samples', () => {
    const monitor = marked();
    const canvas = at(all(monitor, 'canvas'), 3);
    const move = (across: number): void => {
      const event = new MouseEvent('pointermove');
      Object.defineProperty(event, 'offsetX', { value: across });
      canvas.dispatchEvent(event);
    };
    // The chart is 200 wide and shows 120 s.
    move(200 * (1 - 54 / 120));
    expect(tip(monitor)).toContain('In [12] work/train.ipynb · 12 s');
    move(200 * (1 - 30 / 120));
    expect(tip(monitor)).toBe('1.0 GiB, 30 s ago');
    expect(one(monitor, '.tip').ariaLive).toBe('off');
    // Time moves on under a resting pointer.
    monitor.update({ ...fixture(), time: time + 30 });
    monitor.draw();
    expect(tip(monitor)).toBe(
      '34.0 GiB, 30 s ago' + 'this notebook 10.0 GiB' + 'everyone else 23.0 GiB',
    );
    canvas.dispatchEvent(new MouseEvent('pointerleave'));
    expect(tip(monitor)).toBeNull();
  });

  test('a message about a known cell replaces it; a cell without samples says so', () => {
    const monitor = marked();
    monitor.mark([{ ...run, start: time - 49.9, end: time - 49.7, count: null }]);
    monitor.draw();
    at(all(monitor, 'canvas'), 2).focus();
    expect(tip(monitor)).toMatch(/^In \[ \] work\/train.ipynb · 0.2 s · too short for a sample$/);
  });
});

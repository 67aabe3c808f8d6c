/** Mount a monitor in a page without a screen, and read what it shows. */

import { beforeEach, vi } from 'vitest';
import data from '../../tests/data/snapshot.json';
import type { Monitor } from '../src/monitor/monitor.js';
import type { Actions } from '../src/monitor/shared.js';
import { create } from '../src/panel.js';
import type { GpuSample, Snapshot } from '../src/snapshot.js';

export const GIB = 2 ** 30;
export const whole = (): Snapshot => structuredClone(data);
/** Three GPUs, of which one has a MIG device. */
export const fixture = (): Snapshot => {
  const gpus = whole().gpus.filter((gpu) => !gpu.virtual);
  return { ...whole(), gpus, kernels: [], events: [] };
};
export const virtualGpu = (): GpuSample => at(whole().gpus, -1);
export const at = <T>(list: readonly T[], n: number): T => {
  const item = list.at(n);
  if (item === undefined) throw new Error(`there is no item ${n}`);
  return item;
};
export const BUSY = 2;

/** Observers that count what they watch, and report what a test says. */
export class Watcher {
  static all: Watcher[] = [];
  watched = new Set<Element>();
  call: (entries: object[]) => void;
  constructor(call: (entries: object[]) => void) {
    this.call = call;
    Watcher.all.push(this);
  }
  observe(node: Element): void {
    this.watched.add(node);
  }
  unobserve(node: Element): void {
    this.watched.delete(node);
  }
  disconnect(): void {
    this.watched.clear();
  }
}

/** Requested frames, and strokes drawn. */
export const screen = { frames: [] as (() => void)[], strokes: 0 };

beforeEach(() => {
  Watcher.all = [];
  screen.frames = [];
  screen.strokes = 0;
  sessionStorage.clear();
  document.body.replaceChildren();
  vi.stubGlobal('ResizeObserver', class extends Watcher {});
  vi.stubGlobal('IntersectionObserver', class extends Watcher {});
  vi.stubGlobal('requestAnimationFrame', (call: () => void) => screen.frames.push(call));
  vi.stubGlobal('cancelAnimationFrame', () => {});
  const pen = new Proxy(
    { stroke: () => screen.strokes++ },
    { get: (own, name) => Reflect.get(own, name) ?? (() => {}), set: () => true },
  );
  vi.spyOn(HTMLCanvasElement.prototype, 'getContext').mockReturnValue(pen as never);
});

export function mount(snapshot: Snapshot | null = fixture(), actions: Actions = {}): Monitor {
  const monitor = create({ actions });
  document.body.append(monitor.node);
  if (snapshot) monitor.update(snapshot);
  monitor.draw();
  return monitor;
}

export const root = (monitor: Monitor): ShadowRoot => monitor.node.shadowRoot as ShadowRoot;
export const all = (monitor: Monitor, css: string): HTMLElement[] => [
  ...root(monitor).querySelectorAll<HTMLElement>(css),
];
export const one = (monitor: Monitor, css: string): HTMLElement => at(all(monitor, css), 0);
export const text = (monitor: Monitor, css: string): string[] =>
  all(monitor, css).map((node) => node.textContent ?? '');

export function crowd(count: number): Snapshot {
  const snapshot = fixture();
  const model = at(snapshot.gpus, BUSY);
  snapshot.gpus = Array.from({ length: count }, (_, n) => ({
    ...model,
    uuid: `GPU-${n}`,
    index: n,
  }));
  snapshot.processes = [];
  return snapshot;
}

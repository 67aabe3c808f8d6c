// @vitest-environment jsdom
import { expect, test, vi } from 'vitest';
import { Deferred, type Renderer } from '../src/lab/feeds.js';
import type { Monitor } from '../src/monitor/monitor.js';
import { english } from '../src/monitor/shared.js';
import type { CellRun, Snapshot } from '../src/snapshot.js';

/** A renderer that notes what it is told. */
function renderer() {
  const told: string[] = [];
  class Noted {
    node = document.createElement('section');
    update = (snapshot: Snapshot) => told.push(`update ${snapshot.time}`);
    mark = (cells: CellRun[]) => told.push(`mark ${cells.map((cell) => cell.id)}`);
    seed = () => told.push('seed');
    here = (kernel: string | null) => told.push(`here ${kernel}`);
    dispose = () => told.push('dispose');
    connection = ({ kind }: { kind: string }) => told.push(kind);
  }
  return { told, code: { Monitor: Noted as unknown as new () => Monitor } };
}
const at = (time: number) => ({ time }) as Snapshot;
const cell = (id: string) => ({ id }) as CellRun;

test('nothing is fetched before it is looked at, and then once', async () => {
  const { code } = renderer();
  const fetch = vi.fn(async () => code);
  const monitor = new Deferred(fetch, {}, english);
  monitor.update(at(1));
  expect(fetch).not.toHaveBeenCalled();
  await Promise.all([monitor.load(), monitor.load()]);
  await monitor.load();
  expect(fetch).toHaveBeenCalledTimes(1);
  expect(monitor.node.querySelector('section')).not.toBeNull();
  expect(monitor.node.textContent).toBe('');
});

test('what was told before is told then: the newest of what is replaced, all of what adds', async () => {
  const { code, told } = renderer();
  const monitor = new Deferred(async () => code, {}, english);
  monitor.mark([cell('a')]);
  monitor.update(at(1));
  monitor.here('k');
  monitor.update(at(2));
  monitor.mark([cell('b')]);
  await monitor.load();
  expect(told).toEqual(['mark a', 'here k', 'update 2', 'mark b']);
  monitor.update(at(3));
  expect(told.at(-1)).toBe('update 3');
});

test('a failure is said, and tried again under another address when the server answers', async () => {
  const { code, told } = renderer();
  const attempts: number[] = [];
  const fetch = async (attempt: number): Promise<Renderer> => {
    attempts.push(attempt);
    if (attempt === 0) throw new TypeError('gone');
    return code;
  };
  const monitor = new Deferred(fetch, {}, english);
  await monitor.load();
  expect(monitor.node.textContent).toContain('does not answer');
  monitor.connection({ kind: 'lost', text: 'the server cannot be reached' });
  expect(monitor.node.textContent).toBe('the server cannot be reached');
  monitor.connection({ kind: 'live' });
  await vi.waitFor(() => expect(told).toEqual(['live']));
  expect(attempts).toEqual([0, 1]);
});

test('disposed while it is fetched, it stays away', async () => {
  const { code, told } = renderer();
  const monitor = new Deferred(async () => code, {}, english);
  const loading = monitor.load();
  monitor.dispose();
  await loading;
  monitor.update(at(1));
  expect(told).toEqual([]);
  expect(monitor.node.querySelector('section')).toBeNull();
});

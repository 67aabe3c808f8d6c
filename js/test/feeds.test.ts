import { expect, test, vi } from 'vitest';
import { Feeds } from '../src/lab/feeds.js';
import { Stream } from '../src/lab/stream.js';
import type { State } from '../src/monitor/shared.js';
import { FakeEnvironment, snapshot } from './environment.js';

class FakeMonitor {
  state: Partial<State> = {};
  set = (changes: Partial<State>) => void Object.assign(this.state, changes);
  update = vi.fn();
  seed = vi.fn();
  mark = vi.fn();
}

test('each monitor gets everything, and the stream is open while one is visible', () => {
  const environment = new FakeEnvironment();
  const feeds = new Feeds(new Stream(environment));
  const [monitor, second] = [new FakeMonitor(), new FakeMonitor()];
  let visible = false;
  feeds.set({ here: 'k' });
  feeds.add(monitor as never, () => visible);
  expect(monitor.state).toEqual({ here: 'k', connection: { kind: 'standby' } });
  expect(feeds.anyVisible).toBe(false);
  expect(environment.sockets).toEqual([]);
  visible = true;
  feeds.setPeriod(2);
  environment.last.open();
  const wanted = { type: 'want', period: 2, processes: true, since: null };
  expect(environment.last.sent).toEqual([wanted]);
  const past = { time: [1], gpus: {} };
  environment.last.say({ type: 'history', history: past, cells: [] });
  environment.last.say({ type: 'snapshot', snapshot: snapshot(2) });
  expect(monitor.seed).toHaveBeenCalledWith(past);
  expect(monitor.mark).toHaveBeenCalledWith([]);
  feeds.set({ window: 60 });
  expect(monitor.state.window).toBe(60);
  // A later one gets what is known.
  feeds.add(second as never, () => true);
  expect(second.update).toHaveBeenCalledWith(snapshot(2));
  expect(second.state).toEqual(monitor.state);
  feeds.remove(monitor as never);
  expect(feeds.anyVisible).toBe(true);
  feeds.remove(second as never);
  expect(environment.last.readyState).toBe(3);
});

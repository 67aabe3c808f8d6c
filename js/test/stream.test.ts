import { beforeEach, expect, it } from 'vitest';
import { Refused } from '../src/lab/server.js';
import { Stream } from '../src/lab/stream.js';
import type { Want } from '../src/snapshot.js';
import { FakeWorld, Recorder, settled, snapshot } from './world.js';

const ALL: Want = { period: 1, processes: true, history: true };
const SLOW: Want = { period: 5 };

let world: FakeWorld;
let stream: Stream;
let seen: Recorder;

const shot = (time: number) => ({ type: 'snapshot', snapshot: snapshot(time) });
const past = (...time: number[]) => ({ type: 'history', history: { time, gpus: {} }, cells: [] });

beforeEach(() => {
  world = new FakeWorld();
  stream = new Stream(world);
  seen = new Recorder();
});

/** Connects, and lives long enough to be no proxy's victim. */
async function live(want: Want | null = ALL) {
  const subscription = stream.subscribe(seen, want);
  world.last.open();
  world.last.say(shot(100));
  if (want?.history) world.last.say(past(98, 99));
  await world.pass(7000);
  world.last.say(shot(107));
  await world.pass(4000);
  return subscription;
}

it('opens nothing while nobody wants anything', async () => {
  stream.subscribe(seen, null);
  await world.pass(100_000);
  expect(world.sockets).toHaveLength(0);
  expect(seen.states).toEqual(['standby']);
});

it('says what it wants, and the whole past at first', async () => {
  await live();
  expect(world.last.sent).toEqual([{ type: 'want', period: 1, processes: true, since: null }]);
  expect(seen.states).toEqual(['connecting', 'live']);
  expect(seen.snapshots).toEqual([100, 107]);
  expect(seen.histories).toEqual([[98, 99]]);
});

it('asks for no past where nobody wants it', async () => {
  await live(SLOW);
  expect(world.last.sent).toEqual([{ type: 'want', period: 5, processes: false }]);
});

it('has one socket for all, as fast as the fastest', async () => {
  const first = await live(SLOW);
  const second = stream.subscribe(new Recorder(), ALL);
  expect(world.last.sent.at(-1)).toMatchObject({ period: 1, processes: true, since: null });
  second.change(null);
  expect(world.last.sent.at(-1)).toEqual({ type: 'want', period: 5, processes: false });
  second.change(null);
  expect(world.last.sent).toHaveLength(3);
  first.close();
  first.close();
  expect(world.sockets).toHaveLength(1);
  expect(world.last.readyState).toBe(3);
  expect(world.timers).toBe(0);
});

it('tells a newcomer what is known', async () => {
  await live();
  const late = new Recorder();
  stream.subscribe(late, null);
  expect(late.snapshots).toEqual([107]);
  expect(late.states).toEqual(['live']);
});

it('comes back by itself and asks for what it missed', async () => {
  await live();
  world.last.cut();
  expect(seen.states.at(-1)).toBe('connecting');
  await world.pass(1000);
  expect(world.sockets).toHaveLength(2);
  world.last.open();
  expect(world.last.sent).toEqual([{ type: 'want', period: 1, processes: true, since: 107 }]);
  // Cut before the past was told: it is still missed.
  world.last.say(shot(120));
  world.last.cut();
  await world.pass(2000);
  world.last.open();
  expect(world.last.sent[0]).toMatchObject({ since: 107 });
});

it('waits longer and longer for a server that is away, and comes back with it', async () => {
  await live();
  world.last.cut();
  const waits: number[] = [];
  for (let n = 0; n < 9; n++) {
    const count = world.sockets.length;
    const start = world.now();
    while (world.sockets.length === count) await world.pass(250);
    waits.push(Math.round((world.now() - start) / 1000));
    world.last.cut();
    await settled();
  }
  expect(waits).toEqual([1, 1, 2, 4, 8, 16, 30, 30, 30]);
  expect(seen.states.at(-1)).toBe('lost');
  expect(seen.text).toMatch(/No connection/);
  await world.pass(30_000);
  world.last.open();
  world.last.say(shot(300));
  expect(seen.states.at(-1)).toBe('live');
});

it('spreads the waits', async () => {
  world.chance = 0;
  await live();
  world.last.cut();
  await world.pass(499);
  expect(world.sockets).toHaveLength(1);
  await world.pass(1);
  expect(world.sockets).toHaveLength(2);
});

it('tries at once when the page is looked at again or the network is back', async () => {
  await live();
  world.last.cut();
  world.hide(false);
  expect(world.sockets).toHaveLength(2);
});

it('rests while the page is hidden, but not for a glance elsewhere', async () => {
  await live();
  world.hide(true);
  await world.pass(2000);
  world.last.say(shot(110));
  await world.pass(7000);
  world.hide(false);
  world.last.say(shot(117));
  await world.pass(5000);
  expect(world.last.readyState).toBe(1);
  world.hide(true);
  world.last.say(shot(118));
  await world.pass(7000);
  world.last.say(shot(125));
  await world.pass(3000);
  expect(world.last.readyState).toBe(3);
  expect(seen.states.at(-1)).toBe('standby');
  expect(world.timers).toBe(0);
  world.hide(false);
  expect(world.sockets).toHaveLength(2);
});

it('holds a silent socket for dead', async () => {
  await live();
  expect(world.sockets).toHaveLength(1);
  await world.pass(4000);
  expect(world.last.readyState).toBe(3);
  await world.pass(1000);
  expect(world.sockets).toHaveLength(2);
  // This one does not even connect.
  await world.pass(8000);
  expect(world.last.readyState).toBe(3);
});

it('asks once with each attempt where sockets are cut, and says so', async () => {
  world.answer = () => snapshot(50);
  stream.subscribe(seen, ALL);
  for (let n = 0; n < 3; n++) {
    world.last.open();
    world.last.cut();
    await world.pass(2000);
  }
  expect(seen.states.at(-1)).toBe('connecting');
  expect(seen.text).toMatch(/proxy/);
  expect(seen.snapshots).toEqual([50, 50]);
  world.answer = () => new Error('down');
  while (world.last.readyState === 3) await world.pass(1000);
  world.last.cut();
  await settled();
  expect(seen.states.at(-1)).toBe('lost');
  const count = world.sockets.length;
  while (world.sockets.length === count) await world.pass(1000);
  world.last.open();
  world.last.say(shot(99));
  expect(seen.states.at(-1)).toBe('live');
});

it.each([
  [404, /pip install gpumagic/],
  [403, /log in/],
])('explains %i', async (status, text) => {
  world.answer = () => new Refused(status, 'no');
  stream.subscribe(seen, ALL);
  world.last.cut();
  await world.pass(1000);
  world.last.cut();
  await settled();
  expect(seen.states.at(-1)).toBe('lost');
  expect(seen.text).toMatch(text);
});

it('shows nothing that came after it had ended', async () => {
  let answer = (_: unknown) => {};
  world.get = () =>
    new Promise((resolve) => {
      answer = resolve as typeof answer;
    });
  const subscription = stream.subscribe(seen, ALL);
  world.last.cut();
  await world.pass(1000);
  world.last.cut();
  subscription.change(null);
  answer(snapshot(1));
  await settled();
  expect(seen.states.at(-1)).toBe('standby');
  const late = world.last;
  late.say(shot(5));
  expect(seen.snapshots).toEqual([]);
  expect(world.timers).toBe(0);
});

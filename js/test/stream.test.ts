import { beforeEach, expect, it } from 'vitest';
import { Refused } from '../src/lab/server.js';
import { Stream } from '../src/lab/stream.js';
import type { Want } from '../src/snapshot.js';
import { FakeEnvironment, Recorder, settled, snapshot } from './environment.js';

const ALL: Want = { period: 1, processes: true, history: true };
const SLOW: Want = { period: 5 };

let environment: FakeEnvironment;
let stream: Stream;
let seen: Recorder;

const shot = (time: number) => ({ type: 'snapshot', snapshot: snapshot(time) });
const past = (...time: number[]) => ({ type: 'history', history: { time, gpus: {} }, cells: [] });

beforeEach(() => {
  environment = new FakeEnvironment();
  stream = new Stream(environment);
  seen = new Recorder();
});

/** Connect for longer than a proxy that cuts sockets would allow. */
async function live(want: Want | null = ALL) {
  const change = stream.subscribe(seen, want);
  environment.last.open();
  environment.last.say(shot(100));
  if (want?.history) environment.last.say(past(98, 99));
  await environment.pass(7000);
  environment.last.say(shot(107));
  await environment.pass(4000);
  return change;
}

it('opens no socket while nobody wants anything', async () => {
  stream.subscribe(seen, null);
  await environment.pass(100_000);
  expect(environment.sockets).toHaveLength(0);
  expect(seen.states).toEqual(['standby']);
});

it('requests what is wanted, with the whole history at first', async () => {
  await live();
  expect(environment.last.sent).toEqual([
    { type: 'want', period: 1, processes: true, since: null },
  ]);
  expect(seen.states).toEqual(['standby', 'connecting', 'live']);
  expect(seen.snapshots).toEqual([100, 107]);
  expect(seen.histories).toEqual([[98, 99]]);
});

it('requests no history if nobody wants it', async () => {
  await live(SLOW);
  expect(environment.last.sent).toEqual([{ type: 'want', period: 5, processes: false }]);
});

it('has one socket for all listeners, at the shortest period', async () => {
  const first = await live(SLOW);
  const second = stream.subscribe(new Recorder(), ALL);
  expect(environment.last.sent.at(-1)).toMatchObject({ period: 1, processes: true, since: null });
  second(null);
  expect(environment.last.sent.at(-1)).toEqual({ type: 'want', period: 5, processes: false });
  second(null);
  expect(environment.last.sent).toHaveLength(3);
  first(null);
  expect(environment.sockets).toHaveLength(1);
  expect(environment.last.readyState).toBe(3);
  expect(environment.timers).toBe(0);
});

it('gives a new listener the latest snapshot', async () => {
  await live();
  const late = new Recorder();
  stream.subscribe(late, null);
  expect(late.snapshots).toEqual([107]);
  expect(late.states).toEqual(['live']);
});

it('reconnects and requests what it missed', async () => {
  await live();
  environment.last.cut();
  expect(seen.states.at(-1)).toBe('connecting');
  await environment.pass(1000);
  expect(environment.sockets).toHaveLength(2);
  environment.last.open();
  expect(environment.last.sent).toEqual([{ type: 'want', period: 1, processes: true, since: 107 }]);
  // Cut before the history arrived: it is still missing.
  environment.last.say(shot(120));
  environment.last.cut();
  await environment.pass(2000);
  environment.last.open();
  expect(environment.last.sent[0]).toMatchObject({ since: 107 });
});

it('doubles its waits while the server is down, and comes back with it', async () => {
  await live();
  environment.last.cut();
  const waits: number[] = [];
  for (let n = 0; n < 9; n++) {
    const count = environment.sockets.length;
    const start = environment.now();
    while (environment.sockets.length === count) await environment.pass(250);
    waits.push(Math.round((environment.now() - start) / 1000));
    environment.last.cut();
    await settled();
  }
  expect(waits).toEqual([1, 2, 4, 8, 16, 30, 30, 30, 30]);
  expect(seen.states.at(-1)).toBe('lost');
  expect(seen.text).toMatch(/No connection/);
  await environment.pass(30_000);
  environment.last.open();
  environment.last.say(shot(300));
  expect(seen.states.at(-1)).toBe('live');
});

it('randomizes the waits', async () => {
  environment.chance = 0;
  await live();
  environment.last.cut();
  await environment.pass(499);
  expect(environment.sockets).toHaveLength(1);
  await environment.pass(1);
  expect(environment.sockets).toHaveLength(2);
});

it('retries at once when the page is shown or the network is back', async () => {
  await live();
  environment.last.cut();
  await settled();
  environment.hide(false);
  expect(environment.sockets).toHaveLength(2);
});

it('pauses while the page is hidden, but not in the first 10 s', async () => {
  await live();
  environment.hide(true);
  await environment.pass(2000);
  environment.last.say(shot(110));
  await environment.pass(7000);
  environment.hide(false);
  environment.last.say(shot(117));
  await environment.pass(5000);
  expect(environment.last.readyState).toBe(1);
  environment.hide(true);
  environment.last.say(shot(118));
  await environment.pass(7000);
  environment.last.say(shot(125));
  await environment.pass(3000);
  expect(environment.last.readyState).toBe(3);
  expect(seen.states.at(-1)).toBe('standby');
  expect(environment.timers).toBe(0);
  environment.hide(false);
  expect(environment.sockets).toHaveLength(2);
});

it('holds a silent socket for dead', async () => {
  await live();
  expect(environment.sockets).toHaveLength(1);
  await environment.pass(4000);
  expect(environment.last.readyState).toBe(3);
  await environment.pass(1000);
  expect(environment.sockets).toHaveLength(2);
  // This one does not even connect.
  await environment.pass(8000);
  expect(environment.last.readyState).toBe(3);
});

it('requests a snapshot before each attempt while sockets are cut, and says so', async () => {
  environment.answer = () => snapshot(50);
  stream.subscribe(seen, ALL);
  for (let n = 0; n < 3; n++) {
    environment.last.open();
    environment.last.cut();
    await environment.pass(2000);
  }
  expect(seen.states.at(-1)).toBe('connecting');
  expect(seen.text).toMatch(/proxy/);
  expect(seen.snapshots).toEqual([50, 50, 50]);
  environment.answer = () => new Error('down');
  while (environment.last.readyState === 3) await environment.pass(1000);
  environment.last.cut();
  await settled();
  expect(seen.states.at(-1)).toBe('lost');
  const count = environment.sockets.length;
  while (environment.sockets.length === count) await environment.pass(1000);
  environment.last.open();
  environment.last.say(shot(99));
  expect(seen.states.at(-1)).toBe('live');
});

it.each([
  [404, /pip install gpumagic/],
  [403, /log in/],
])('explains %i', async (status, text) => {
  environment.answer = () => new Refused(status, 'no');
  stream.subscribe(seen, ALL);
  environment.last.cut();
  await environment.pass(1000);
  environment.last.cut();
  await settled();
  expect(seen.states.at(-1)).toBe('lost');
  expect(seen.text).toMatch(text);
});

it('shows nothing that came after it had ended', async () => {
  let answer = (_: unknown) => {};
  environment.get = () =>
    new Promise((resolve) => {
      answer = resolve as typeof answer;
    });
  const change = stream.subscribe(seen, ALL);
  environment.last.cut();
  await environment.pass(1000);
  environment.last.cut();
  change(null);
  answer(snapshot(1));
  await settled();
  expect(seen.states.at(-1)).toBe('standby');
  const late = environment.last;
  late.say(shot(5));
  expect(seen.snapshots).toEqual([]);
  expect(environment.timers).toBe(0);
});

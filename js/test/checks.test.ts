import { beforeEach, expect, it } from 'vitest';
import { AlertPoll, Alerts } from '../src/lab/alerts.js';
import { DoctorClient } from '../src/lab/no-gpu.js';
import { read } from '../src/lab/settings.js';
import { Stream } from '../src/lab/stream.js';
import { english, type State } from '../src/monitor/shared.js';
import type { Check, GpuSample } from '../src/snapshot.js';
import { FakeWorld, settled, snapshot } from './world.js';

const CHECK = { name: 'driver', ok: false, found: 'none', cure: 'install it' };
const GPUS = [
  {
    ...{ uuid: 'GPU-1', index: 0, mig: null, lost: false, xid: null },
    ...{ temperature: null, throttle: null, memory_used: null },
  } as GpuSample,
];
const wrong = (code: string) =>
  snapshot(1, { problems: [{ code, cause: '', cure: '', uuid: null }] });

let world: FakeWorld;
let shown: (Check[] | null)[];
let doctor: DoctorClient;

beforeEach(() => {
  world = new FakeWorld();
  world.answer = () => [CHECK];
  shown = [];
  const set = ({ checks = null }: Partial<State>) => void shown.push(checks);
  doctor = new DoctorClient(world, set, () => {});
});

it('asks the doctor once for each thing that is wrong, where there is no GPU', async () => {
  for (const code of ['a', 'a', 'b', 'b']) {
    doctor.snapshot(wrong(code));
    await settled();
  }
  expect(world.asked).toEqual(['doctor', 'doctor']);
  expect(shown).toEqual([[CHECK], [CHECK]]);
  doctor.snapshot(snapshot(2, { gpus: GPUS }));
  expect(shown.at(-1)).toBeNull();
});

it('asks again after an answer that did not come', async () => {
  world.answer = () => new Error('away');
  doctor.snapshot(wrong('a'));
  await settled();
  doctor.snapshot(wrong('a'));
  expect(world.asked).toEqual(['doctor', 'doctor']);
  expect(shown).toEqual([]);
});

it('leaves what a person has called for, and looks again at the machine too', async () => {
  doctor.snapshot(snapshot(1, { gpus: GPUS }));
  await doctor.ask();
  doctor.snapshot(snapshot(2, { gpus: GPUS }));
  expect(shown).toEqual([[CHECK]]);
  await doctor.again();
  expect(world.asked).toEqual(['doctor', 'snapshot', 'doctor']);
});

it('goes when it is called once more, unless it was not seen or is needed', async () => {
  await doctor.toggle(true);
  await doctor.toggle(false);
  expect(shown).toEqual([[CHECK], [CHECK]]);
  await doctor.toggle(true);
  expect(shown.at(-1)).toBeNull();
  doctor.snapshot(wrong('a'));
  await doctor.toggle(true);
  await doctor.toggle(true);
  expect(shown.at(-1)).toEqual([CHECK]);
});

it('asks rarely who holds memory while nobody looks, and only where it can be of use', async () => {
  const processes = [{ uuid: 'GPU-1', pid: 1 }];
  const stream = new Stream(world);
  const poll = new AlertPoll(new Alerts(read().limits, english), stream, world, () => {});
  world.answer = () => ({ ...snapshot(3, { gpus: GPUS }), processes });
  await world.pass(130_000);
  expect(world.asked).toEqual([]);
  stream.show(snapshot(1, { gpus: GPUS }));
  await world.pass(60_000);
  expect(world.asked).toEqual(['snapshot']);
  expect(stream.latest?.processes).toHaveLength(1);
  // Known by now, as when the panel is open.
  await world.pass(60_000);
  stream.show(snapshot(4, { gpus: GPUS }));
  world.isHidden = true;
  await world.pass(60_000);
  expect(world.asked).toHaveLength(1);
  poll.setLimits(read().limits);
  expect(world.last.readyState).toBe(0);
  const { memoryAlert, heatAlert, idleAlert, faultAlert, ...rest } = read().limits;
  expect([memoryAlert, heatAlert, idleAlert, faultAlert]).toEqual([true, true, true, true]);
  const none = { memoryAlert: false, heatAlert: false, idleAlert: false, faultAlert: false };
  poll.setLimits({ ...rest, ...none });
  expect(world.last.readyState).toBe(3);
});

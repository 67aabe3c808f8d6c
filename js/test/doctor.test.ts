import { beforeEach, expect, it } from 'vitest';
import { AlertPoll, Alerts } from '../src/lab/alerts.js';
import { DoctorClient } from '../src/lab/no-gpu.js';
import { Stream } from '../src/lab/stream.js';
import { english, type State } from '../src/monitor/shared.js';
import type { Check, GpuSample } from '../src/snapshot.js';
import { FakeEnvironment, limits, settled, snapshot } from './environment.js';

const CHECK = { name: 'driver', ok: false, found: 'none', cure: 'install it' };
const GPUS = [
  {
    ...{ uuid: 'GPU-1', index: 0, mig: null, lost: false, xid: null },
    ...{ temperature: null, throttle: null, memory_used: null },
  } as GpuSample,
];
const wrong = (code: string) =>
  snapshot(1, { problems: [{ code, cause: '', cure: '', uuid: null }] });

let environment: FakeEnvironment;
let shown: (Check[] | null)[];
let doctor: DoctorClient;

beforeEach(() => {
  environment = new FakeEnvironment();
  environment.answer = () => [CHECK];
  shown = [];
  const set = ({ checks = null }: Partial<State>) => void shown.push(checks);
  doctor = new DoctorClient(environment, { set }, { show: () => {} });
});

it('requests the checks once for each problem if there is no GPU', async () => {
  for (const code of ['a', 'a', 'b', 'b']) {
    doctor.snapshot(wrong(code));
    await settled();
  }
  expect(environment.asked).toEqual(['doctor', 'doctor']);
  expect(shown).toEqual([[CHECK], [CHECK]]);
  doctor.snapshot(snapshot(2, { gpus: GPUS }));
  expect(shown.at(-1)).toBeNull();
});

it('requests the checks again after a failed request', async () => {
  environment.answer = () => new Error('away');
  doctor.snapshot(wrong('a'));
  await settled();
  doctor.snapshot(wrong('a'));
  expect(environment.asked).toEqual(['doctor', 'doctor']);
  expect(shown).toEqual([]);
});

it('keeps requested checks, and also requests a new snapshot when asked again', async () => {
  doctor.snapshot(snapshot(1, { gpus: GPUS }));
  await doctor.ask();
  doctor.snapshot(snapshot(2, { gpus: GPUS }));
  expect(shown).toEqual([[CHECK]]);
  await doctor.again();
  expect(environment.asked).toEqual(['doctor', 'snapshot', 'doctor']);
});

it('the command hides the checks, unless they were not visible or there is no GPU', async () => {
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

it('requests the processes once a minute, if there are GPUs and the page is visible', async () => {
  const processes = [{ uuid: 'GPU-1', pid: 1 }];
  const stream = new Stream(environment);
  const poll = new AlertPoll(
    new Alerts(limits(), english),
    stream,
    environment,
    () => {},
    () => {},
    () => {},
  );
  environment.answer = () => ({ ...snapshot(3, { gpus: GPUS }), processes });
  await environment.pass(130_000);
  expect(environment.asked).toEqual([]);
  stream.show(snapshot(1, { gpus: GPUS }));
  await environment.pass(60_000);
  expect(environment.asked).toEqual(['snapshot']);
  expect(stream.latest?.processes).toHaveLength(1);
  // Known by now, as when the panel is open.
  await environment.pass(60_000);
  stream.show(snapshot(4, { gpus: GPUS }));
  environment.isHidden = true;
  await environment.pass(60_000);
  expect(environment.asked).toHaveLength(1);
  poll.setLimits(limits());
  expect(environment.last.readyState).toBe(0);
  const none = { memoryAlert: false, heatAlert: false, idleAlert: false, faultAlert: false };
  poll.setLimits(limits(none));
  expect(environment.last.readyState).toBe(3);
});

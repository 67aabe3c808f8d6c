import { expect, it } from 'vitest';
import fixture from '../../tests/data/snapshot.json';
import { choose, ownGpu, statusText } from '../src/lab/status-text.js';
import { fullLabel } from '../src/monitor/names.js';
import { english } from '../src/monitor/shared.js';
import type { GpuSample, Snapshot } from '../src/snapshot.js';

const FIXTURE: Snapshot = fixture;
const MIG = pick((gpu) => gpu.mig !== null);
const BUSY = { ...pick((gpu) => gpu.utilization === 97), ordinal: null };
const VIRTUAL = pick((gpu) => gpu.virtual);
const GIB = 2 ** 30;

function pick(which: (gpu: GpuSample) => boolean): GpuSample {
  const found = FIXTURE.gpus.find(which);
  if (!found) throw new Error('no such GPU in the fixture');
  return found;
}

const machine = (changes: Partial<Snapshot>): Snapshot => ({
  ...FIXTURE,
  processes: [],
  problems: [],
  ...changes,
});
const text = (...gpus: GpuSample[]) => statusText(machine({ gpus }), null, english).text;

it('is one GPU in a few words', () => {
  const gpu = { ...BUSY, index: 0, utilization: 45, memory_used: 12.3 * GIB };
  expect(text(gpu)).toBe('GPU 0 45 % · 12.3/80 GiB');
  expect(text({ ...gpu, utilization: null })).toBe('GPU 0 12.3/80 GiB');
  expect(text({ ...gpu, memory_used: null })).toBe('GPU 0 45 %');
  expect(text({ ...gpu, memory_used: null, utilization: null })).toBe('GPU 0 N/A');
  expect(text({ ...gpu, memory_used: 0, utilization: 0 })).toBe('GPU 0 0 % · 0.0/80 GiB');
  expect(text({ ...gpu, memory_total: null })).toBe('GPU 0 45 % · 12.3 GiB');
  expect(text({ ...gpu, memory_total: 23.5 * GIB })).toBe('GPU 0 45 % · 12.3/23.5 GiB');
  expect(text({ ...gpu, memory_total: 512 * 2 ** 20, memory_used: 2 ** 20 })).toBe(
    'GPU 0 45 % · 1.0/512 MiB',
  );
});

it('is the busiest of many, the fuller of equally busy ones, a lost one last', () => {
  expect(text(VIRTUAL, BUSY)).toBe('GPU 1 97 % · 34.0/80 GiB');
  const full = { ...BUSY, index: 5, uuid: 'full', memory_used: BUSY.memory_total };
  expect(text(BUSY, full)).toBe('busiest of 2: GPU 5 97 % · 80.0/80 GiB');
  expect(choose(machine({ gpus: [{ ...BUSY, lost: true }, VIRTUAL] }), null)).toMatchObject({
    lost: true,
  });
  expect(choose(machine({ gpus: [VIRTUAL] }), null)).toBe(VIRTUAL);
});

it('is the one on which the current notebook holds most', () => {
  const kernel = 'k';
  const [one] = FIXTURE.processes;
  if (!one) throw new Error('no process');
  const processes = [
    { ...one, kernel, memory: 5, uuid: BUSY.uuid },
    { ...one, kernel, memory: 3, uuid: VIRTUAL.uuid },
    { ...one, kernel, memory: 3, uuid: VIRTUAL.uuid, child: true },
    { ...one, kernel: 'another', memory: 99, uuid: MIG.uuid },
  ];
  const snapshot = machine({ processes, gpus: [MIG, BUSY, VIRTUAL] });
  const own = ownGpu(snapshot, kernel);
  expect(own).toEqual({ uuid: VIRTUAL.uuid, ordinal: 0, notebook: 'train.ipynb' });
  expect(ownGpu(snapshot, 'nobody')).toBeNull();
  expect(statusText(snapshot, own, english).text).toBe('train.ipynb: cuda:0 13 % · 3.0/16 GiB');
  const gone = { uuid: 'GPU-gone', ordinal: 3, notebook: 'train.ipynb' };
  expect(statusText(snapshot, gone, english).text).toBe('GPU 1 97 % · 34.0/80 GiB');
  const here = { ...gone, uuid: BUSY.uuid };
  expect(statusText(snapshot, here, english).text).toContain('train.ipynb: cuda:3 97 %');
});

it('tells of all of them, and of what is wrong, in the details', () => {
  const { text, details, wrong } = statusText(
    machine({ gpus: FIXTURE.gpus, problems: FIXTURE.problems }),
    null,
    english,
  );
  expect(wrong).toBe(true);
  expect(text).toMatch(/^⚠ busiest of 3: cuda:0 97 %/);
  const lines = details.split('\n');
  expect(lines[FIXTURE.gpus.indexOf(MIG)]).toBe(
    'GPU 0 MIG 1g.10gb 1.0/10 GiB · NVIDIA H100 80GB HBM3 MIG 1g.10gb',
  );
  expect(lines.at(-1)).toMatch(/fallen off the bus.*: see dmesg/);
  const many = Array.from({ length: 64 }, (_, index) => ({ ...BUSY, index, uuid: `${index}` }));
  expect(
    statusText(machine({ gpus: many }), null, english)
      .details.split('\n')
      .at(-1),
  ).toBe('and 48 more');
});

it('says that there is no GPU, which alone is nothing wrong', () => {
  const none = (code: string) =>
    statusText(
      machine({ gpus: [], problems: [{ code, cause: 'c', cure: 'd', uuid: null }] }),
      null,
      english,
    );
  const said = { text: 'no GPU', details: 'c', wrong: false, full: false };
  expect(none('library-missing')).toEqual(said);
  const wrong = { text: '⚠ no GPU', details: 'c: d', wrong: true, full: false };
  expect(none('version-mismatch')).toEqual(wrong);
});

it('says where memory is nearly full', () => {
  const gpu = { ...BUSY, memory_used: 79.5 * GIB };
  expect(statusText(machine({ gpus: [gpu] }), null, english).full).toBe(true);
  expect(statusText(machine({ gpus: [BUSY] }), null, english).full).toBe(false);
});

it('names a lost GPU as lost', () => {
  expect(text({ ...BUSY, lost: true })).toBe('⚠ GPU 1 lost');
  expect(fullLabel({ ...BUSY, index: null, uuid: 'GPU-4f2a19c3-00' })).toBe('GPU 4f2a19c3');
});

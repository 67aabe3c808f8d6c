/** GPUs that are not NVIDIA's: their names and drivers. */

import { expect, test } from 'vitest';
import { aliasHint, drivers, label, torchName } from '../src/monitor/names.js';
import { english } from '../src/monitor/shared.js';
import type { GpuSample, Snapshot } from '../src/snapshot.js';
import { at, BUSY, fixture, mount, one } from './stage.js';

const gpu = (vendor: string, changes: Partial<GpuSample> = {}): GpuSample => ({
  ...at(fixture().gpus, BUSY),
  uuid: `GPU-${vendor}`,
  vendor,
  ...changes,
});
const amd: Snapshot = {
  ...fixture(),
  driver: null,
  cuda: null,
  software: ['ROCm 6.2.4', 'amdgpu 6.8.5'],
  gpus: [gpu('amd', { name: 'AMD Instinct MI300X OAM', index: 3, ordinal: 0 })],
  processes: [],
  problems: [],
};

test.each([
  ['amd', 1, 'cuda:1', 'AMD 3', 'the number in amd-smi'],
  ['intel', 1, 'xpu:1', 'Intel 3', 'its number on this machine'],
  ['apple', 0, 'mps', 'Apple 3', 'its number on this machine'],
  ['nvidia', 1, 'cuda:1', 'GPU 3', 'the number in nvidia-smi'],
])('%s: torch’s name, or else the driver’s number', (vendor, ordinal, here, else_, hint) => {
  const one = gpu(vendor, { index: 3 });
  expect(torchName(one, ordinal)).toBe(here);
  expect(label(one, ordinal)).toBe(here);
  expect(label({ ...one, ordinal: null })).toBe(else_);
  expect(aliasHint(one, english)).toBe(hint);
});

test('the drivers are those of the machine’s GPUs', () => {
  expect(drivers(amd, english)).toEqual(['ROCm 6.2.4', 'amdgpu 6.8.5']);
  const both = { ...amd, cuda: '13.0', software: ['amdgpu'] };
  expect(drivers(both, english)).toEqual(['CUDA 13.0', 'amdgpu']);
});

test('an AMD GPU has no word of CUDA but its name', () => {
  const monitor = mount(amd);
  one(monitor, '.axis > .more').click();
  monitor.draw();
  const shown = one(monitor, '.gpu').textContent ?? '';
  expect(shown).toContain('cuda:0MI300X34/80 GiB');
  expect(shown).toContain('cuda:0');
  expect(shown).toContain(' · AMD 3 · ');
  expect(shown).not.toMatch(/CUDA \d|SM |MIG|nvidia/i);
});

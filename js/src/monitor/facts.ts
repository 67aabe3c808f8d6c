/** What an opened card tells: the readings that are known, one row each. */

import type { GpuSample } from '../snapshot.js';
import { Field, h, Rows } from './dom.js';
import type { Shared, Translate } from './shared.js';
import { age, energy, reading, size, watts } from './units.js';
import { torchName } from './words.js';

type Fact = readonly [name: string, value: string];

const both = (...parts: (string | null)[]): string => parts.filter(Boolean).join(' · ');
const known = (value: number | null, say: (value: number) => string): string | null =>
  value === null ? null : say(value);

/** Name and value of what is known; what is not known has no row. */
export function facts(gpu: GpuSample, now: number, t: Translate): Fact[] {
  const percent = (value: number): string => reading(value, '%');
  const clock = (at: number | null, limit: number | null): string | null =>
    known(at, (mhz) => `${mhz}${limit === null ? '' : ` / ${limit}`} MHz`);
  const rates = (into: number | null, out: number | null): string | null =>
    into === null && out === null
      ? null
      : both(
          known(into, (rate) => `↓ ${size(rate)}/s`),
          known(out, (rate) => `↑ ${size(rate)}/s`),
        );
  const nvidia = (gpu.vendor ?? 'nvidia') === 'nvidia';
  const rows: [string, string | null][] = [
    [nvidia ? t('SM clock') : t('GPU clock'), clock(gpu.sm_clock, gpu.sm_clock_limit)],
    [t('Memory clock'), clock(gpu.memory_clock, gpu.memory_clock_limit)],
    [t('Slowed by'), gpu.throttle?.length ? gpu.throttle.join(', ') : null],
    [
      t('SM activity'),
      both(
        known(gpu.sm_activity, percent),
        known(gpu.sm_occupancy, (value) => t('occupancy %1', percent(value))),
      ),
    ],
    [t('Tensor cores'), known(gpu.tensor_activity, percent)],
    [t('DRAM activity'), known(gpu.dram_activity ?? gpu.memory_utilization, percent)],
    ['PCIe', both(link(gpu, t), rates(gpu.pcie_received, gpu.pcie_sent))],
    ['NVLink', rates(gpu.nvlink_received, gpu.nvlink_sent)],
    [
      'ECC',
      both(
        known(gpu.ecc_corrected, (count) => t('%1 corrected', count)),
        known(gpu.ecc_uncorrected, (count) => t('%1 uncorrected', count)),
      ),
    ],
    [
      t('Last Xid'),
      known(gpu.xid, (xid) =>
        both(
          String(xid),
          known(gpu.xid_time, (at) => t('%1 ago', age(now - at))),
        ),
      ),
    ],
    [t('Power'), known(gpu.power, (power) => watts(power, gpu.power_limit))],
    [t('Slows at'), known(gpu.temperature_limit, (limit) => reading(limit, '°C'))],
    [t('Fan'), known(gpu.fan, percent)],
    [
      t('Energy'),
      known(gpu.energy, (joules) => t('%1 since the driver was loaded', energy(joules))),
    ],
    [t('Memory'), gpu.unified ? t('shared with the host') : null],
    [t('Here'), known(gpu.ordinal, (n) => torchName(gpu, n) + (gpu.ordinal_certain ? '' : '?'))],
    ['UUID', gpu.uuid],
  ];
  return rows.filter((row): row is [string, string] => !!row[1]);
}

function link(gpu: GpuSample, t: Translate): string | null {
  const say = (generation: number | null, width: number | null): string =>
    [known(generation, (n) => t('gen %1', n)), known(width, (n) => `×${n}`)]
      .filter(Boolean)
      .join(' ');
  const now = say(gpu.pcie_generation, gpu.pcie_width);
  const most = say(gpu.pcie_generation_limit, gpu.pcie_width_limit);
  return most && now && most !== now ? t('%1 of %2', now, most) : now;
}

class FactRow {
  #value = new Field('dd');
  readonly node: HTMLElement;

  constructor([name]: Fact) {
    this.node = h('div', '', h('dt', 'dim', name), this.#value.node);
  }

  update([, value]: Fact): void {
    // A number and its unit stay on one line.
    this.#value.say(value.replace(/(?<=[\d/↓↑]) (?!·)/g, '\u00a0'));
  }
}

export class Facts {
  readonly node = h('dl', 'facts');
  #rows = new Rows<Fact, FactRow>(this.node, (fact) => new FactRow(fact));
  #shared: Shared;

  constructor(shared: Shared) {
    this.#shared = shared;
  }

  update(gpu: GpuSample): void {
    const { now, t } = this.#shared;
    this.#rows.update(facts(gpu, now, t).map((fact) => [fact[0], fact] as const));
  }
}

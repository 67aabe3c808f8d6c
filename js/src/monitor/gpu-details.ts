/** Show what an open GPU tells: faults, charts, memory holders, variables, and all readings. */

import type { GpuSample } from '../snapshot.js';
import { MemoryBar } from './bars.js';
import { Chart } from './chart.js';
import { Badges, Field, h, Rows, show } from './dom.js';
import { called, faults, file, full, torchName } from './names.js';
import type { View } from './owners.js';
import { Processes } from './processes.js';
import type { Shared, Translate } from './shared.js';
import { age, energy, filled, NOT_KNOWN, reading, size, watts } from './units.js';
import { Held } from './variables.js';

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

/** A MIG device below its parent. */
class Slice {
  readonly node: HTMLElement;
  #name = new Field('b');
  #memory = new Field('span', 'number');
  #bar: MemoryBar;
  #processes: Processes;
  #shared: Shared;

  constructor(shared: Shared) {
    this.#shared = shared;
    this.#bar = new MemoryBar(shared, true);
    this.#processes = new Processes(shared, shared.t('Processes'));
    const line = h('div', 'slice', this.#name.node, this.#bar.node, this.#memory.node);
    this.node = h('li', '', line, this.#processes.node);
  }

  update(view: View): void {
    const { gpu, parts, processes, unseen } = view;
    this.#name.say(called(view, this.#shared.here)).hint(gpu.uuid);
    this.#bar.update(parts, gpu.memory_total);
    this.#memory
      .say(filled(gpu.memory_used, gpu.memory_total) ?? NOT_KNOWN)
      .look(full(gpu) ? 'number warn' : 'number');
    this.#processes.update(processes, unseen, true);
  }
}

export class Body {
  readonly node: HTMLElement;
  #shared: Shared;
  #faults = new Badges();
  #were = new Field('div', 'dim');
  #busy: Chart;
  #memory: Chart;
  #span = new Field();
  #slices: Rows<View, Slice>;
  #processes: Processes;
  #held: Held | null = null;
  #facts: Facts | null = null;
  #more: HTMLButtonElement | null = null;
  #all = false;
  #gpu: GpuSample;

  /** `brief`: what is opened is only this, and all readings are one press further. */
  constructor(view: View, shared: Shared, brief: boolean) {
    const { t } = shared;
    const { uuid } = view.gpu;
    this.#shared = shared;
    this.#gpu = view.gpu;
    this.#busy = new Chart('utilization', t('Utilization'), uuid, shared);
    this.#memory = new Chart('memory', t('Memory'), uuid, shared);
    this.#slices = new Rows(h('ul', 'slices'), () => new Slice(shared));
    this.#processes = new Processes(shared, t('Processes on %1', called(view, shared.here)));
    const axis = h('div', 'axis dim', this.#span.node, h('span', '', t('now')));
    axis.setAttribute('aria-hidden', 'true');
    this.node = h(
      'div',
      'body',
      this.#faults.node,
      this.#were.node,
      h('div', 'charts', this.#busy.node, this.#memory.node, axis),
      this.#slices.node,
      this.#processes.node,
    );
    if (shared.actions.holdings) {
      this.#held = new Held(uuid, shared);
      this.node.append(this.#held.node);
    }
    if (!brief) return;
    this.#more = h('button', 'dim more', t('all readings'));
    this.#more.type = 'button';
    this.#more.ariaExpanded = 'false';
    this.#more.addEventListener('click', () => {
      this.#all = !this.#all;
      (this.#more as HTMLElement).ariaExpanded = String(this.#all);
      this.#tell(this.#all);
    });
    this.node.append(this.#more);
  }

  update(view: View, open: boolean): void {
    const { gpu, migs, processes, unseen } = view;
    this.#gpu = gpu;
    this.#faults.update(faults(gpu, this.#shared.t));
    this.#were.offer(gpu.lost ? this.#whoWas(gpu.uuid) : '');
    this.#busy.value.say(reading(gpu.utilization, '%'));
    this.#memory.value
      .say(filled(gpu.memory_used, gpu.memory_total) ?? NOT_KNOWN)
      .look(full(gpu) ? 'warn' : '');
    this.#span.say(`−${age(this.#shared.window)}`);
    this.#busy.update(gpu);
    this.#memory.update(gpu);
    this.#slices.update(migs.map((mig) => [mig.gpu.uuid, mig] as const));
    show(this.#slices.node, migs.length > 0);
    this.#processes.update(processes, unseen, open);
    this.#held?.update(view);
    this.#tell(this.#more ? this.#all : open);
  }

  #tell(all: boolean): void {
    if (all && !this.#facts) {
      this.#facts = new Facts(this.#shared);
      this.node.append(this.#facts.node);
    } else if (!all && this.#facts) {
      this.#facts.node.remove();
      this.#facts = null;
    }
    this.#facts?.update(this.#gpu);
  }

  draw(): void {
    this.#busy.draw();
    this.#memory.draw();
  }

  dispose(): void {
    this.#busy.dispose();
    this.#memory.dispose();
    this.#held?.dispose();
  }

  /** "train.ipynb was here". */
  #whoWas(uuid: string): string {
    const { t, runs, were } = this.#shared;
    const last = runs.of(uuid).at(-1)?.notebook;
    const names = were.get(uuid) ?? (last ? [file(last)] : []);
    if (names.length > 1) return t('%1 were here', names.join(', '));
    return names.length ? t('%1 was here', names[0] as string) : '';
  }
}

/** Show an open GPU: faults, charts, processes, variables, and on request all readings. */

import type { GpuSample } from '../snapshot.js';
import { MemoryBar } from './bars.js';
import { Chart } from './chart.js';
import { Badges, button, expand, Field, h, Rows, show } from './dom.js';
import { faults, file, full, labelOf, torchName } from './names.js';
import type { View } from './owners.js';
import { Processes } from './processes.js';
import type { Shared, Translate } from './shared.js';
import { age, energy, filled, NOT_KNOWN, reading, size, watts } from './units.js';
import { Variables } from './variables.js';

type Fact = readonly [name: string, value: string];

const both = (...parts: (string | null)[]): string => parts.filter(Boolean).join(' · ');
const known = (value: number | null, format: (value: number) => string): string | null =>
  value === null ? null : format(value);

/** Return the name and value of each known reading. */
function facts(gpu: GpuSample, now: number, t: Translate): Fact[] {
  const percent = (value: number): string => reading(value, '%');
  const clock = (at: number | null, limit: number | null): string | null =>
    known(at, (mhz) => `${mhz}${limit === null ? '' : ` / ${limit}`} MHz`);
  const rates = (into: number | null, out: number | null): string =>
    both(
      known(into, (rate) => `↓ ${size(rate)}/s`),
      known(out, (rate) => `↑ ${size(rate)}/s`),
    );
  const occupancy = known(gpu.sm_occupancy, (value) => t('occupancy %1', percent(value)));
  const xidAge = known(gpu.xid_time, (at) => t('%1 ago', age(now - at)));
  const rows: [string, string | null][] = [
    [
      gpu.vendor === 'nvidia' ? t('SM clock') : t('GPU clock'),
      clock(gpu.sm_clock, gpu.sm_clock_limit),
    ],
    [t('Memory clock'), clock(gpu.memory_clock, gpu.memory_clock_limit)],
    [t('Throttled by'), gpu.throttle?.length ? gpu.throttle.join(', ') : null],
    [t('SM activity'), both(known(gpu.sm_activity, percent), occupancy)],
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
    [t('Last Xid'), known(gpu.xid, (xid) => both(String(xid), xidAge))],
    [t('Power'), known(gpu.power, (power) => watts(power, gpu.power_limit))],
    [t('Throttles at'), known(gpu.temperature_limit, (limit) => reading(limit, '°C'))],
    [t('Fan'), known(gpu.fan, percent)],
    [
      t('Energy'),
      known(gpu.energy, (joules) => t('%1 since the driver was loaded', energy(joules))),
    ],
    [t('Memory'), gpu.unified ? t('shared with the host') : null],
    [
      t('Device here'),
      known(gpu.ordinal, (n) => torchName(gpu, n) + (gpu.ordinal_certain ? '' : '?')),
    ],
    ['UUID', gpu.uuid],
  ];
  return rows.filter((row): row is [string, string] => !!row[1]);
}

/** "gen 5 ×16", or "gen 3 ×8 of gen 5 ×16" if the link is slower than possible. */
function link(gpu: GpuSample, t: Translate): string {
  const format = (generation: number | null, width: number | null): string =>
    [known(generation, (n) => t('gen %1', n)), known(width, (n) => `×${n}`)]
      .filter(Boolean)
      .join(' ');
  const now = format(gpu.pcie_generation, gpu.pcie_width);
  const most = format(gpu.pcie_generation_limit, gpu.pcie_width_limit);
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
    this.#value.text(value.replace(/(?<=[\d/↓↑]) (?!·)/g, '\u00a0'));
  }
}

/** A MIG device of this GPU. */
class Slice {
  readonly node: HTMLElement;
  #name = new Field('b');
  #memory = new Field('span', 'number');
  #bar: MemoryBar;
  #processes: Processes;
  #shared: Shared;

  constructor(shared: Shared) {
    this.#shared = shared;
    this.#bar = new MemoryBar(shared);
    this.#processes = new Processes(shared, shared.t('Processes'));
    const line = h('div', 'slice', this.#name.node, this.#bar.node, this.#memory.node);
    this.node = h('li', '', line, this.#processes.node);
  }

  update(view: View): void {
    const { gpu, parts, processes, unattributed } = view;
    this.#name.text(labelOf(view, this.#shared.here)).title(gpu.uuid);
    this.#bar.update(parts, gpu.memory_total);
    this.#memory
      .text(filled(gpu.memory_used, gpu.memory_total) ?? NOT_KNOWN)
      .className(full(gpu) ? 'number warn' : 'number');
    this.#processes.update(processes, unattributed, true);
  }
}

export class GpuDetails {
  readonly node: HTMLElement;
  #shared: Shared;
  #faults = new Badges();
  #were = new Field('div', 'dim');
  #busy: Chart;
  #memory: Chart;
  #span = new Field();
  #slices: Rows<View, Slice>;
  #processes: Processes;
  #variables: Variables | null = null;
  #facts = new Rows(h('dl', 'facts'), (fact: Fact) => new FactRow(fact));
  #more: HTMLButtonElement;
  #gpu: GpuSample;

  constructor(view: View, shared: Shared) {
    const { t } = shared;
    const { uuid } = view.gpu;
    this.#shared = shared;
    this.#gpu = view.gpu;
    this.#busy = new Chart('utilization', t('Utilization'), uuid, shared);
    this.#memory = new Chart('memory', t('Memory'), uuid, shared);
    this.#slices = new Rows(h('ul', 'slices'), () => new Slice(shared));
    this.#processes = new Processes(shared, t('Processes on %1', labelOf(view, shared.here)));
    if (shared.actions.variables) this.#variables = new Variables(uuid, shared);
    this.#more = button('more', () => this.#toggle(), t('Details'));
    const axis = h('div', 'axis dim', this.#more, this.#span.node, h('span', '', t('now')));
    this.node = h(
      'div',
      'body',
      this.#faults.node,
      this.#were.node,
      h('div', 'charts', this.#busy.node, this.#memory.node, axis),
      this.#facts.node,
      this.#slices.node,
      this.#processes.node,
      ...(this.#variables ? [this.#variables.node] : []),
    );
  }

  get #key(): string {
    return `details ${this.#gpu.uuid}`;
  }

  update(view: View): void {
    const { gpu, migs, processes, unattributed } = view;
    const { t, window, now, open } = this.#shared;
    this.#gpu = gpu;
    this.#faults.update(faults(gpu, t));
    this.#were.textOrHide(gpu.lost ? this.#lastUser(gpu.uuid) : '');
    this.#busy.value.text(reading(gpu.utilization, '%'));
    this.#memory.value
      .text(filled(gpu.memory_used, gpu.memory_total) ?? NOT_KNOWN)
      .className(full(gpu) ? 'warn' : '');
    this.#span.text(`−${age(window)}`);
    this.#busy.update(gpu);
    this.#memory.update(gpu);
    this.#slices.update(migs, (mig) => mig.gpu.uuid);
    show(this.#slices.node, migs.length > 0);
    this.#processes.update(processes, unattributed, false);
    this.#variables?.update(view);
    const details = open.get(this.#key) ?? false;
    expand(this.#more, details);
    show(this.#facts.node, details);
    this.#facts.update(details ? facts(gpu, now, t) : [], ([name]) => name);
  }

  draw(): void {
    this.#busy.draw();
    this.#memory.draw();
  }

  dispose(): void {
    this.#busy.dispose();
    this.#memory.dispose();
    this.#variables?.dispose();
  }

  #toggle(): void {
    const { open, toggled, redraw } = this.#shared;
    open.set(this.#key, !open.get(this.#key));
    toggled();
    redraw();
  }

  /** "Last used by train.ipynb". */
  #lastUser(uuid: string): string {
    const { t, runs, were } = this.#shared;
    const last = runs.of(uuid).at(-1)?.notebook;
    const names = were.get(uuid) ?? (last ? [file(last)] : []);
    return names.length ? t('Last used by %1', names.join(', ')) : '';
  }
}

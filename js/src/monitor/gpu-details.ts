/** Show an open GPU: its vitals, charts and variables, and on request all other readings. */

import type { GpuSample } from '../snapshot.js';
import { MemoryBar } from './bars.js';
import { Chart } from './chart.js';
import { button, expand, Field, h, Rows, show } from './dom.js';
import { alias, aliasHint, clock, full, labelOf, torchName } from './names.js';
import type { View } from './owners.js';
import type { Shared, Translate } from './shared.js';
import { age, filled, NOT_KNOWN, reading, share, watts } from './units.js';
import { VariablesTable } from './variables.js';

type Fact = readonly [name: string, value: string];

const both = (...parts: (string | null)[]): string => parts.filter(Boolean).join(' · ');
const known = (value: number | null, format: (value: number) => string): string | null =>
  value === null ? null : format(value);

/** Return the name and value of each known reading. */
function facts(gpu: GpuSample, now: number, trans: Translate): Fact[] {
  const percent = (value: number): string => reading(value, '%');
  const xidAge = known(gpu.xid_time, (at) => trans.__('%1 ago', age(now - at)));
  const rows: [string, string | null][] = [
    [trans.__('Memory activity'), known(gpu.memory_utilization, percent)],
    ['PCIe', link(gpu, trans)],
    [
      'ECC',
      both(
        known(gpu.ecc_corrected, (count) => trans.__('%1 corrected', count)),
        known(gpu.ecc_uncorrected, (count) => trans.__('%1 uncorrected', count)),
      ),
    ],
    [trans.__('Last Xid'), known(gpu.xid, (xid) => both(String(xid), xidAge))],
    [trans.__('Throttles at'), known(gpu.temperature_limit, (limit) => reading(limit, '°C'))],
    [trans.__('Fan'), known(gpu.fan, percent)],
    [trans.__('Memory'), gpu.unified ? trans.__('shared with the host') : null],
    [
      trans.__('Device here'),
      known(gpu.ordinal, (n) => torchName(gpu, n) + (gpu.ordinal_certain ? '' : '?')),
    ],
    ['UUID', gpu.uuid],
  ];
  return rows.filter((row): row is [string, string] => !!row[1]);
}

/** "gen 5 ×16", or "gen 3 ×8 of gen 5 ×16" if the link is slower than possible. */
function link(gpu: GpuSample, trans: Translate): string {
  const format = (generation: number | null, width: number | null): string =>
    [known(generation, (n) => trans.__('gen %1', n)), known(width, (n) => `×${n}`)]
      .filter(Boolean)
      .join(' ');
  const now = format(gpu.pcie_generation, gpu.pcie_width);
  const most = format(gpu.pcie_generation_limit, gpu.pcie_width_limit);
  return most && now && most !== now ? trans.__('%1 of %2', now, most) : now;
}

/** "71 °C · 672/700 W · 1755/1980 MHz · GPU 1 · memory 2619 MHz": the end may be cut. */
function vitals(view: View, { trans, here }: Shared): string {
  const { gpu } = view;
  const memory = known(gpu.memory_clock, (mhz) => trans.__('memory %1 MHz', mhz));
  const power = watts(gpu.power, gpu.power_limit);
  const now = clock(gpu.sm_clock, gpu.sm_clock_limit);
  const parts = [reading(gpu.temperature, '°C'), power, now, alias(view, here), memory];
  return both(...parts).replaceAll(' / ', '/');
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
  #shared: Shared;

  constructor(shared: Shared) {
    this.#shared = shared;
    this.#bar = new MemoryBar(shared);
    this.node = h('li', 'slice', this.#name.node, this.#bar.node, this.#memory.node);
  }

  update(view: View): void {
    const { gpu, parts } = view;
    this.#name.text(labelOf(view, this.#shared.here)).title(gpu.uuid);
    this.#bar.update(parts, gpu.memory_total);
    this.#memory
      .text(filled(gpu.memory_used, gpu.memory_total) ?? NOT_KNOWN)
      .className(full(gpu) ? 'number warn' : 'number');
  }
}

export class GpuDetails {
  readonly node: HTMLElement;
  #shared: Shared;
  #key: string;
  #vitals = new Field('div', 'vitals dim');
  #busy: Chart;
  #memory: Chart;
  #span = new Field();
  #slices: Rows<View, Slice>;
  #variables: VariablesTable;
  #facts = new Rows(h('dl', 'facts'), (fact: Fact) => new FactRow(fact));
  #more: HTMLButtonElement;

  constructor(uuid: string, shared: Shared) {
    const { trans, opened } = shared;
    this.#shared = shared;
    this.#key = `details ${uuid}`;
    this.#busy = new Chart('utilization', trans.__('Utilization'), uuid, shared);
    this.#memory = new Chart('memory', trans.__('Memory'), uuid, shared);
    this.#slices = new Rows(h('ul', 'slices'), () => new Slice(shared));
    this.#variables = new VariablesTable(uuid, shared);
    const toggle = () => opened.set(this.#key, !opened.get(this.#key));
    this.#more = button('more', toggle, trans.__('Details'));
    const axis = h('div', 'axis dim', this.#more, this.#span.node, h('span', '', trans.__('now')));
    const charts = h('div', 'charts', this.#busy.node, this.#memory.node, axis);
    const below = [this.#facts, this.#slices, this.#variables].map(({ node }) => node);
    this.node = h('div', 'body', this.#vitals.node, charts, ...below);
  }

  update(view: View): void {
    const { gpu, migs } = view;
    const { trans, window, now, opened } = this.#shared;
    this.#vitals
      .textOrHide(gpu.lost || gpu.virtual ? '' : vitals(view, this.#shared))
      .title(aliasHint(gpu, trans));
    this.#busy.value.text(reading(gpu.utilization, '%'));
    this.#memory.value
      .text(share(gpu.memory_used, gpu.memory_total) ?? NOT_KNOWN)
      .className(full(gpu) ? 'warn' : '');
    this.#span.text(`−${age(window)}`);
    this.#busy.update(gpu);
    this.#memory.update(gpu);
    this.#slices.update(migs, (mig) => mig.gpu.uuid);
    show(this.#slices.node, migs.length > 0);
    this.#variables.update(view);
    const open = opened.get(this.#key) ?? false;
    expand(this.#more, open);
    show(this.#facts.node, open);
    this.#facts.update(open ? facts(gpu, now, trans) : [], ([name]) => name);
  }

  draw(): void {
    this.#busy.draw();
    this.#memory.draw();
  }
}

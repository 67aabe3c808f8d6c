/** Below a GPU's head: faults, charts, who holds the memory; opened, all that is known. */

import type { GpuSample } from '../snapshot.js';
import { Badges } from './badges.js';
import { MemoryBar } from './bar.js';
import { Chart } from './chart.js';
import { Field, h, Rows, show } from './dom.js';
import { Facts } from './facts.js';
import { Held } from './held.js';
import { Processes } from './processes.js';
import type { Shared } from './shared.js';
import type { View } from './split.js';
import { age, filled, NOT_KNOWN, reading } from './units.js';
import { called, faults, file, full } from './words.js';

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

/** Below a GPU's head: faults, charts, who holds the memory; opened, all that is known. */

import { Badges } from './badges.js';
import { MemoryBar } from './bar.js';
import { Chart } from './chart.js';
import { Field, h, Rows, show } from './dom.js';
import { Facts } from './facts.js';
import { Processes } from './processes.js';
import type { Shared } from './shared.js';
import type { View } from './split.js';
import { reading, share } from './units.js';
import { faults, label } from './words.js';

/** A MIG device below its parent. */
class Slice {
  readonly node: HTMLElement;
  #name = new Field('b');
  #memory = new Field('span', 'number');
  #bar: MemoryBar;
  #processes: Processes;

  constructor(shared: Shared) {
    this.#bar = new MemoryBar(shared, true);
    this.#processes = new Processes(shared, shared.t('Processes'));
    const line = h('div', 'slice', this.#name.node, this.#bar.node, this.#memory.node);
    this.node = h('li', '', line, this.#processes.node);
  }

  update({ gpu, parts, processes, unseen }: View): void {
    this.#name.say(label(gpu)).hint(gpu.uuid);
    this.#bar.update(parts, gpu.memory_total);
    this.#memory.say(share(gpu.memory_used, gpu.memory_total));
    this.#processes.update(processes, unseen, true);
  }
}

export class Body {
  readonly node: HTMLElement;
  #shared: Shared;
  #faults = new Badges();
  #busy: Chart;
  #memory: Chart;
  #bar: MemoryBar;
  #slices: Rows<View, Slice>;
  #processes: Processes;
  #facts: Facts | null = null;

  constructor({ gpu }: View, shared: Shared) {
    const { t } = shared;
    this.#shared = shared;
    this.#busy = new Chart('utilization', t('Utilization'), gpu.uuid, shared);
    this.#memory = new Chart('memory', t('Memory'), gpu.uuid, shared);
    this.#bar = new MemoryBar(shared, true);
    this.#memory.node.append(this.#bar.node);
    this.#slices = new Rows(h('ul', 'slices'), () => new Slice(shared));
    this.#processes = new Processes(shared, t('Processes on %1', label(gpu)));
    this.node = h(
      'div',
      'body',
      this.#faults.node,
      h('div', 'charts', this.#busy.node, this.#memory.node),
      this.#slices.node,
      this.#processes.node,
    );
  }

  update(view: View, open: boolean): void {
    const { gpu, parts, migs, processes, unseen } = view;
    this.#faults.update(faults(gpu, this.#shared.t));
    this.#busy.value.say(reading(gpu.utilization, '%'));
    this.#memory.value.say(share(gpu.memory_used, gpu.memory_total));
    this.#busy.update(gpu);
    this.#memory.update(gpu);
    this.#bar.update(parts, gpu.memory_total);
    this.#slices.update(migs.map((mig) => [mig.gpu.uuid, mig] as const));
    show(this.#slices.node, migs.length > 0);
    this.#processes.update(processes, unseen, open);
    if (open && !this.#facts) {
      this.#facts = new Facts(this.#shared);
      this.node.append(this.#facts.node);
    } else if (!open && this.#facts) {
      this.#facts.node.remove();
      this.#facts = null;
    }
    this.#facts?.update(gpu);
  }

  draw(): void {
    this.#busy.draw();
    this.#memory.draw();
  }

  dispose(): void {
    this.#busy.dispose();
    this.#memory.dispose();
  }
}

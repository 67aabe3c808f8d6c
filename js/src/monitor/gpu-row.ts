/** Show one GPU in a line that opens; what does not fit is cut from the right. */

import { MemoryBar } from './bars.js';
import { Badges, button, CHEVRON, expand, Field, h, icon } from './dom.js';
import { GpuDetails } from './gpu-details.js';
import { alias, faults, full, holderName, hot, labelOf, model } from './names.js';
import { groups, type View } from './owners.js';
import type { Shared } from './shared.js';
import { NOT_KNOWN, reading, share } from './units.js';

let count = 0;

/** "H100 ▮▮▮▮ 76/80 GiB 97 % 71° 672 W train.ipynb". */
class Readings {
  #shared: Shared;
  #model = new Field('span', 'model dim');
  #memory: MemoryBar;
  #used = new Field('span', 'used');
  #busy = new Field('span', 'percent');
  #heat = new Field('span', 'heat');
  #power = new Field('span', 'power');
  #who = new Field('span', 'whose dim');
  readonly nodes: HTMLElement[];

  constructor(shared: Shared) {
    this.#shared = shared;
    this.#memory = new MemoryBar(shared);
    const fields = [this.#used, this.#busy, this.#heat, this.#power, this.#who];
    this.nodes = [this.#model.node, this.#memory.node, ...fields.map(({ node }) => node)];
  }

  update(view: View): void {
    const { trans, here } = this.#shared;
    const { gpu, migs, parts, processes } = view;
    const bare = gpu.lost || gpu.virtual;
    this.#model.text(model(view, trans)).title(`${gpu.name ?? ''} ${gpu.uuid}`.trim());
    this.#memory.update(parts, gpu.memory_total);
    this.#used
      .text(gpu.lost ? trans.__('lost') : (share(gpu.memory_used, gpu.memory_total) ?? NOT_KNOWN))
      .className(gpu.lost ? 'used bad' : full(gpu) ? 'used warn' : 'used');
    this.#busy.text(gpu.lost ? '' : reading(gpu.utilization, '%'));
    this.#heat
      .textOrHide(bare ? '' : reading(gpu.temperature, '°').replace(' ', ''))
      .className(hot(gpu) ? 'heat bad' : 'heat');
    this.#power.textOrHide(bare ? '' : reading(gpu.power, 'W'));
    const all = groups([...processes, ...migs.flatMap((mig) => mig.processes)], here);
    const names = all.map(({ main }) => holderName(main, trans));
    const more = names.length > 1 ? ` +${names.length - 1}` : '';
    this.#who.text((names[0] ?? '') + more).title(names.join(', '));
  }
}

/** A GPU, and whether it is open unless the user closed it. */
export interface GpuItem {
  view: View;
  open: boolean;
}

export class GpuRow {
  readonly node: HTMLElement;
  #shared: Shared;
  #kind = new Field('span', 'kind');
  #number = new Field();
  #label = new Field('b');
  #button: HTMLButtonElement;
  #readings: Readings;
  #faults = new Badges();
  #details: GpuDetails | null = null;
  #id = `gpu-${count++}`;

  constructor({ view }: GpuItem, shared: Shared) {
    this.#shared = shared;
    this.#readings = new Readings(shared);
    this.#button = button('open', () => {}, icon(CHEVRON), this.#label.node);
    this.#label.node.append(this.#kind.node, this.#number.node);
    this.#button.setAttribute('aria-controls', this.#id);
    const head = h('div', 'head', this.#button, ...this.#readings.nodes);
    // The whole line opens it. Clicks on the button, which is for the keyboard, bubble up to here.
    head.addEventListener('click', () => shared.opened.set(view.gpu.uuid, !this.#details));
    this.node = h('li', 'gpu', head, this.#faults.node);
  }

  update({ view, open }: GpuItem): void {
    const { gpu, parts } = view;
    const { trans, here, opened } = this.#shared;
    this.#expand(opened.get(gpu.uuid) ?? open, gpu.uuid);
    const [, kind = '', number = ''] = /^(\w+:)?(.*)/.exec(labelOf(view, here)) ?? [];
    this.#kind.text(kind);
    this.#number.text(number);
    this.#label.className(parts.own > 0 ? 'here' : '').title(alias(view, here));
    this.#readings.update(view);
    this.#faults.update(faults(gpu, trans));
    this.node.classList.toggle('lost', gpu.lost);
    this.#details?.update(view);
  }

  draw(): void {
    this.#details?.draw();
  }

  #expand(open: boolean, uuid: string): void {
    expand(this.#button, open);
    this.node.classList.toggle('opened', open);
    if (open === (this.#details !== null)) return;
    this.#details?.node.remove();
    this.#details = open ? new GpuDetails(uuid, this.#shared) : null;
    if (!this.#details) return;
    this.#details.node.id = this.#id;
    this.node.append(this.#details.node);
  }
}

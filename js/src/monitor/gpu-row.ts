/** Show one GPU in a line that opens; what does not fit is cut from the right. */

import { MemoryBar, TimingRow } from './bars.js';
import type { Visibility } from './browser.js';
import { Badges, button, CHEVRON, expand, Field, h, icon } from './dom.js';
import { GpuDetails } from './gpu-details.js';
import { alias, faults, full, holderName, hot, labelOf, model, torchName } from './names.js';
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

export interface Item {
  view: View;
  /** Whether it is open unless the user closed it. */
  standing: boolean;
}

export class GpuRow {
  readonly node: HTMLElement;
  #shared: Shared;
  #visibility: Visibility;
  #item: Item;
  #visible = true;
  #late = false;
  #kind = new Field('span', 'kind');
  #number = new Field();
  #label = new Field('b');
  #button: HTMLButtonElement;
  #readings: Readings;
  #faults = new Badges();
  #timing: TimingRow;
  #details: GpuDetails | null = null;
  #id = `gpu-${count++}`;

  constructor(item: Item, shared: Shared, visibility: Visibility) {
    [this.#item, this.#shared, this.#visibility] = [item, shared, visibility];
    this.#readings = new Readings(shared);
    this.#timing = new TimingRow(shared.trans.__('Timing'));
    this.#button = button('open', () => {}, icon(CHEVRON), this.#label.node);
    this.#label.node.append(this.#kind.node, this.#number.node);
    this.#button.setAttribute('aria-controls', this.#id);
    const head = h('div', 'head', this.#button, ...this.#readings.nodes);
    // The whole line opens it. Clicks on the button, which is for the keyboard, bubble up to here.
    head.addEventListener('click', () => this.#toggle());
    this.node = h('li', 'gpu', head, this.#faults.node, this.#timing.node);
    visibility.add(this.node, ({ isIntersecting }) => this.#see(isIntersecting));
  }

  get #open(): boolean {
    return this.#shared.open.get(this.#item.view.gpu.uuid) ?? this.#item.standing;
  }

  /** A row that is not on the screen is written when it gets there. */
  #see(visible: boolean): void {
    this.#visible = visible;
    if (!visible) return;
    if (this.#late) this.#write();
    this.draw();
  }

  update(item: Item): void {
    this.#item = item;
    this.#late = !this.#visible;
    if (this.#visible) this.#write();
  }

  #write(): void {
    this.#late = false;
    const { view } = this.#item;
    const { gpu, parts } = view;
    const { trans, here, timing } = this.#shared;
    this.#expand(this.#open);
    const [, kind = '', number = ''] = /^(\w+:)?(.*)/.exec(labelOf(view, here)) ?? [];
    this.#kind.text(kind);
    this.#number.text(number);
    this.#label.className(parts.own > 0 ? 'here' : '').title(alias(view, here));
    this.#readings.update(view);
    this.#faults.update(faults(gpu, trans));
    const where = torchName(gpu, gpu.ordinal ?? -1);
    this.#timing.update(timing.bars?.find((bar) => bar.where === where));
    this.node.classList.toggle('lost', gpu.lost);
    this.#details?.update(view);
  }

  draw(): void {
    if (this.#visible) this.#details?.draw();
  }

  dispose(): void {
    this.#visibility.remove(this.node);
    this.#details?.dispose();
    this.#details = null;
  }

  #toggle(): void {
    this.#shared.open.set(this.#item.view.gpu.uuid, !this.#open);
    this.#write();
    this.draw();
    this.#shared.toggled();
  }

  #expand(open: boolean): void {
    expand(this.#button, open);
    this.node.classList.toggle('opened', open);
    if (open && !this.#details) {
      this.#details = new GpuDetails(this.#item.view, this.#shared);
      this.#details.node.id = this.#id;
      this.node.append(this.#details.node);
    } else if (!open && this.#details) {
      this.#details.node.remove();
      this.#details.dispose();
      this.#details = null;
    }
  }
}

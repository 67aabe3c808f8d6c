/** Show one GPU: a line that opens. */

import { MemoryBar, ShareBar, TimingRow } from './bars.js';
import type { Visibility } from './browser.js';
import { Badges, button, CHEVRON, expand, Field, h, icon, show } from './dom.js';
import { GpuDetails } from './gpu-details.js';
import {
  alias,
  aliasHint,
  faults,
  full,
  hot,
  kinds,
  labelOf,
  model,
  otherNotebook,
  torchName,
} from './names.js';
import type { View } from './owners.js';
import type { Shared } from './shared.js';
import { NOT_KNOWN, reading, size, watts } from './units.js';

let count = 0;

/** The readings on a closed line. */
class Readings {
  #shared: Shared;
  #mark = new Field('span', 'mark');
  #busy = new ShareBar();
  #percent = new Field('span', 'number');
  #notebook = new Field('span', 'of dim');
  #memory: MemoryBar;
  #used = new Field('span', 'number');
  #heat = new Field('span', 'number');
  readonly node: HTMLElement;

  constructor(shared: Shared) {
    this.#shared = shared;
    this.#memory = new MemoryBar(shared);
    const load = [this.#notebook.node, this.#busy.node, this.#percent.node];
    const memory = [this.#memory.node, this.#used.node, this.#heat.node];
    this.node = h('span', 'readings', this.#mark.node, ...load, ...memory);
  }

  update(view: View): void {
    const { t, here } = this.#shared;
    const { gpu, parts } = view;
    const wrong = faults(gpu, t);
    const bad = wrong.some(([, tone]) => tone === 'bad');
    this.#mark
      .text(wrong.length ? '!' : '')
      .className(`mark ${bad ? 'bad' : 'warn'}`)
      .title(wrong.map(([text]) => text).join(', '));
    // The notebook of a virtual GPU says more than its utilization.
    const notebook = otherNotebook(view, here);
    this.#notebook.textOrHide(notebook).title(notebook);
    show(this.#busy.node, !notebook);
    show(this.#percent.node, !notebook);
    this.#busy.update(gpu.utilization);
    this.#percent.text(gpu.lost ? t('lost') : reading(gpu.utilization, '%'));
    this.#memory.update(parts, gpu.memory_total);
    this.#used
      .text(gpu.lost ? NOT_KNOWN : size(gpu.memory_used))
      .className(full(gpu) ? 'number warn' : 'number');
    this.#heat
      .text(gpu.virtual ? '' : reading(gpu.temperature, '°').replace(' ', ''))
      .className(hot(gpu) ? 'number bad' : 'number');
  }
}

/** The head of an open line. */
class Head {
  #shared: Shared;
  #alias = new Field('span', 'also dim');
  #kinds = new Badges();
  #model = new Field('span', 'name dim');
  #heat = new Field();
  #power = new Field();
  #warm = h('span', 'heat', this.#heat.node, ' · ', this.#power.node);
  readonly node = h(
    'span',
    'about',
    this.#alias.node,
    this.#kinds.node,
    this.#model.node,
    this.#warm,
  );

  constructor(shared: Shared) {
    this.#shared = shared;
  }

  update(view: View): void {
    const { gpu } = view;
    const { t, here } = this.#shared;
    const name = model(view, this.#shared);
    this.#alias.textOrHide(alias(view, here)).title(aliasHint(gpu, t));
    this.#kinds.update(kinds(view, t));
    this.#model.text(name).title(`${name} ${gpu.uuid}`.trim());
    // A virtual GPU has no temperature and no power.
    show(this.#warm, !gpu.virtual && !gpu.lost);
    this.#heat.text(reading(gpu.temperature, '°C')).className(hot(gpu) ? 'bad' : '');
    this.#power.text(reading(gpu.power, 'W')).title(watts(gpu.power, gpu.power_limit));
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
  #label = new Field('b');
  #button: HTMLButtonElement;
  #readings: Readings;
  #head: Head;
  #timing: TimingRow;
  #details: GpuDetails | null = null;
  #id = `gpu-${count++}`;

  constructor(item: Item, shared: Shared, visibility: Visibility) {
    [this.#item, this.#shared, this.#visibility] = [item, shared, visibility];
    this.#readings = new Readings(shared);
    this.#head = new Head(shared);
    this.#timing = new TimingRow(shared.t('Timing'));
    this.#button = button('open', () => {}, icon(CHEVRON), this.#label.node);
    this.#button.setAttribute('aria-controls', this.#id);
    const head = h('div', 'head', this.#button, this.#readings.node, this.#head.node);
    // The whole line opens it. Clicks on the button, which is for the keyboard, bubble up to here.
    head.addEventListener('click', () => this.#toggle());
    this.node = h('li', 'gpu', head, this.#timing.node);
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
    const { here, timing } = this.#shared;
    const open = this.#open;
    this.#expand(open);
    this.#label
      .text(labelOf(view, here))
      .className(parts.own > 0 ? 'here' : '')
      .title([alias(view, here), model(view, this.#shared)].filter(Boolean).join(' · '));
    if (open) this.#head.update(view);
    else this.#readings.update(view);
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
    show(this.#readings.node, !open);
    show(this.#head.node, open);
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

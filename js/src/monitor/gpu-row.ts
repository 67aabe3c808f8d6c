/** One GPU: a card, or where there are many a line that opens into one. */

import { MemoryBar, Pace, ShareBar } from './bars.js';
import type { Sight } from './browser.js';
import { Badges, CHEVRON, Field, h, icon, show } from './dom.js';
import { Body } from './gpu-details.js';
import { also, called, faults, full, hot, kinds, model, numbered, torchName } from './names.js';
import type { View } from './owners.js';
import type { Shared } from './shared.js';
import { NOT_KNOWN, reading, size, watts } from './units.js';

let made = 0;
const whole = (value: number | null): string => (value === null ? NOT_KNOWN : value.toFixed(0));

/** The parts of a head that differ between a card and a line. */
interface Head {
  readonly nodes: HTMLElement[];
  update(view: View): void;
}

class CardHead implements Head {
  #shared: Shared;
  #kinds = new Badges();
  #also = new Field('span', 'also dim');
  #name = new Field('span', 'name dim');
  #heat = new Field();
  #power = new Field();
  #limit = new Field('span', 'limit');
  #unit = new Field();
  #warm: HTMLElement;
  readonly nodes: HTMLElement[];

  constructor(shared: Shared) {
    this.#shared = shared;
    const power = [this.#power.node, this.#limit.node, this.#unit.node];
    this.#warm = h('span', 'heat', this.#heat.node, ' · ', ...power);
    this.nodes = [this.#also.node, this.#kinds.node, this.#name.node, this.#warm];
  }

  update(view: View): void {
    const { gpu } = view;
    const { t } = this.#shared;
    this.#also.offer(also(view, this.#shared.here)).hint(numbered(gpu, t));
    this.#kinds.update(kinds(view, t));
    const name = model(view, t);
    this.#name.say(name).hint(`${name} ${gpu.uuid}`.trim());
    // A virtual GPU has neither warmth nor current.
    show(this.#warm, !gpu.virtual && !gpu.lost);
    this.#heat.say(reading(gpu.temperature, '°C')).look(hot(gpu) ? 'bad' : '');
    const known = gpu.power !== null;
    this.#power.say(whole(gpu.power)).hint(watts(gpu.power, gpu.power_limit));
    this.#limit.say(known && gpu.power_limit !== null ? ` / ${whole(gpu.power_limit)}` : '');
    this.#unit.say(known ? ' W' : '');
  }
}

class LineHead implements Head {
  #shared: Shared;
  #mark = new Field('span', 'mark');
  #busy = new ShareBar();
  #percent = new Field('span', 'number');
  #memory: MemoryBar;
  #used = new Field('span', 'number');
  #heat = new Field('span', 'number');
  readonly nodes: HTMLElement[];

  constructor(shared: Shared) {
    this.#shared = shared;
    this.#memory = new MemoryBar(shared, false);
    this.nodes = [
      this.#mark.node,
      this.#busy.node,
      this.#percent.node,
      this.#memory.node,
      this.#used.node,
      this.#heat.node,
    ];
  }

  update({ gpu, parts }: View): void {
    const { t } = this.#shared;
    const wrong = faults(gpu, t);
    const bad = wrong.some(([, look]) => look === 'bad');
    this.#mark
      .say(wrong.length ? '!' : '')
      .look(`mark ${bad ? 'bad' : 'warn'}`)
      .hint(wrong.map(([text]) => text).join(', '));
    this.#busy.update(gpu.utilization);
    this.#percent.say(gpu.lost ? t('lost') : reading(gpu.utilization, '%'));
    this.#memory.update(parts, gpu.memory_total);
    this.#used
      .say(gpu.lost ? NOT_KNOWN : size(gpu.memory_used))
      .look(full(gpu) ? 'number warn' : 'number');
    this.#heat
      .say(
        gpu.virtual ? '' : gpu.temperature === null ? NOT_KNOWN : `${Math.round(gpu.temperature)}°`,
      )
      .look(hot(gpu) ? 'number bad' : 'number');
  }
}

export class Card {
  readonly node: HTMLElement;
  #visible = true;
  #late = false;
  #shared: Shared;
  #sight: Sight;
  #compact: boolean;
  #uuid: string;
  #head: Head;
  #button: HTMLButtonElement;
  #label = new Field('b');
  #pace: Pace | null = null;
  #body: Body | null = null;
  #view: View;
  #id = `gpu-${made++}`;

  constructor(view: View, compact: boolean, shared: Shared, sight: Sight) {
    this.#shared = shared;
    this.#sight = sight;
    this.#compact = compact;
    this.#view = view;
    this.#uuid = view.gpu.uuid;
    this.#head = compact ? new LineHead(shared) : new CardHead(shared);
    this.#button = h('button', 'open', icon(CHEVRON), this.#label.node);
    this.#button.type = 'button';
    this.#button.setAttribute('aria-controls', this.#id);
    const head = h('div', 'head', this.#button, ...this.#head.nodes);
    // The whole line opens it; the button in it is for the keyboard, and its clicks arrive here.
    head.addEventListener('click', () => this.#toggle());
    this.node = h('li', compact ? 'gpu line' : 'gpu card', head);
    sight.watch(this.node, (visible) => this.#see(visible));
    this.#show();
  }

  get #open(): boolean {
    return this.#shared.open.get(this.#uuid) ?? this.#view.standing;
  }

  /** What is not on the screen is written when it comes there. */
  #see(visible: boolean): void {
    this.#visible = visible;
    if (!visible) return;
    if (this.#late) this.#write();
    this.draw();
  }

  update(view: View): void {
    this.#view = view;
    if (this.#visible) this.#write();
    else this.#late = true;
  }

  #write(): void {
    this.#late = false;
    const view = this.#view;
    const { gpu } = view;
    this.#show();
    const { here } = this.#shared;
    const other = this.#compact ? also(view, here) : '';
    this.#label
      .say(called(view, here))
      .look(view.parts.mine > 0 ? 'own' : '')
      .hint([other, model(view, this.#shared.t)].filter(Boolean).join(' · '));
    this.#head.update(view);
    const where = torchName(gpu, gpu.ordinal ?? -1);
    const bar = this.#shared.timing.bars?.find((bar) => bar.where === where);
    if (bar && !this.#pace) {
      this.#pace = new Pace(this.#shared.t('Timing'));
      this.node.firstElementChild?.after(this.#pace.node);
    }
    this.#pace?.update(bar);
    this.node.classList.toggle('lost', gpu.lost);
    this.#body?.update(view, this.#open);
  }

  draw(): void {
    if (this.#visible) this.#body?.draw();
  }

  dispose(): void {
    this.#sight.unwatch(this.node);
    this.#body?.dispose();
    this.#body = null;
  }

  #toggle(): void {
    this.#shared.open.set(this.#uuid, !this.#open);
    this.#show();
    this.#write();
    this.draw();
    this.#shared.toggled();
  }

  #show(): void {
    const open = this.#open;
    if (this.#button.ariaExpanded !== String(open)) this.#button.ariaExpanded = String(open);
    if (open || !this.#compact) {
      if (!this.#body) {
        this.#body = new Body(this.#view, this.#shared, this.#compact);
        this.#body.node.id = this.#id;
        this.node.append(this.#body.node);
      }
    } else if (this.#body) {
      this.#body.node.remove();
      this.#body.dispose();
      this.#body = null;
    }
  }
}

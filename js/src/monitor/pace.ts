/** A device's bar while a measurement runs. */

import type { TimingBar } from '../snapshot.js';
import { ShareBar } from './bar.js';
import { Field, h, show } from './dom.js';

export class Pace {
  #label: string;
  #where = new Field();
  #bar = new ShareBar();
  #text = new Field('span', 'number');
  readonly node = h('div', 'slice pace', this.#where.node, this.#bar.node, this.#text.node);

  /** Called by the device where `label` is empty. */
  constructor(label = '') {
    this.#label = label;
  }

  update(bar: TimingBar | undefined): void {
    show(this.node, !!bar);
    if (!bar) return;
    this.#where.say(this.#label || bar.where);
    this.#bar.update(100 * bar.share);
    this.#text.say(bar.text);
  }
}

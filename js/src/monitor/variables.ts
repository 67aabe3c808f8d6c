/** What of this notebook holds a GPU's memory: opened by a press, and asked for only while open. */

import { type GpuHoldings, type Holding, TOO_LONG_S } from '../snapshot.js';
import { ShareBar } from './bars.js';
import { CHEVRON, Field, h, icon, Rows, show } from './dom.js';
import type { View } from './owners.js';
import type { Shared } from './shared.js';
import { size } from './units.js';

let made = 0;

class HoldingRow {
  readonly node: HTMLElement;
  #name = new Field('span', 'title');
  #size = new Field('span', 'size');
  #note = new Field('span', 'dim note');
  #bar = new ShareBar('mine');

  constructor() {
    const { node: name } = this.#name;
    this.node = h('li', 'holding', name, this.#size.node, this.#note.node, this.#bar.node);
  }

  update({ row, whole }: { row: Holding; whole: number }): void {
    const notes = [row.made, row.kind].filter(Boolean).join(' · ');
    this.#name.say(row.name).hint([row.name, ...row.aliases].join(', '));
    this.#size.say(size(row.nbytes));
    this.#bar.update((100 * row.nbytes) / (whole || 1));
    this.#note.offer(notes).hint(notes);
  }
}

export class Held {
  readonly node: HTMLElement;
  #shared: Shared;
  #uuid: string;
  #button: HTMLButtonElement;
  #list = h('div');
  #said = new Field('div', 'dim note');
  #rows: Rows<{ row: Holding; whole: number }, HoldingRow>;
  #more = new Field('div', 'dim note');
  #open = false;

  constructor(uuid: string, shared: Shared) {
    const { t } = shared;
    this.#shared = shared;
    this.#uuid = uuid;
    this.#list.id = `held-${made++}`;
    this.#button = h('button', 'open', icon(CHEVRON), t('What of this notebook holds it'));
    this.#button.type = 'button';
    this.#button.setAttribute('aria-controls', this.#list.id);
    this.#button.addEventListener('click', () => this.#turn(!this.#open));
    this.#rows = new Rows(h('ul', 'holdings'), () => new HoldingRow());
    this.#rows.node.setAttribute('aria-label', t('What of this notebook holds it'));
    this.#list.append(this.#rows.node, this.#more.node, this.#said.node);
    this.node = h('div', 'held-here', this.#button, this.#list);
    this.#show();
  }

  update({ parts }: View): void {
    const { holdings, t, open } = this.#shared;
    show(this.node, parts.mine > 0 || this.#open);
    // As the reader left it.
    if (open.get(this.#key) && !this.#open && parts.mine > 0) this.#turn(true);
    if (!this.#open) return;
    const known = typeof holdings === 'object' && holdings !== null;
    const found: GpuHoldings | undefined = known ? holdings.gpus[this.#uuid] : undefined;
    const whole = found?.allocated ?? 0;
    // What a name holds of torch's, and of another library's, are two rows.
    this.#rows.update((found?.rows ?? []).map((row, n) => [String(n), { row, whole }] as const));
    this.#more.offer(found?.more ? t('%1 more, %2', found.more, size(found.left)) : '');
    this.#said.offer(known ? this.#asOf(holdings.cell, holdings.seconds, !found) : this.#why());
  }

  dispose(): void {
    if (this.#open) this.#shared.wants(this.#uuid, false);
    this.#open = false;
  }

  get #key(): string {
    return `held ${this.#uuid}`;
  }

  #why(): string {
    const { holdings, t, runs, here } = this.#shared;
    if (typeof holdings === 'string') return holdings;
    return runs.running(here) ? t('when the cell has ended') : t('asking the kernel…');
  }

  #asOf(cell: number, seconds: number, nothing: boolean): string {
    const { t, here, runs } = this.#shared;
    const words = nothing ? [t('torch holds nothing here')] : [];
    words.push(cell > 0 ? t('as of In [%1]', cell) : t('as of now'));
    if (runs.running(here)) words.push(t('a cell is running'));
    else if (seconds >= TOO_LONG_S) words.push(t('close and open to look again'));
    return words.join(' · ');
  }

  #turn(open: boolean): void {
    const { toggled, wants } = this.#shared;
    this.#open = open;
    this.#shared.open.set(this.#key, open);
    this.#show();
    wants(this.#uuid, open);
    toggled();
  }

  #show(): void {
    this.#button.ariaExpanded = String(this.#open);
    show(this.#list, this.#open);
  }
}

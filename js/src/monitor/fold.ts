/** The virtual GPUs of another notebook: a line under its name, which opens. */

import { CHEVRON, Field, h, icon, show } from './dom.js';
import type { Shared } from './shared.js';
import { owner, type View } from './split.js';
import { size } from './units.js';
import { file } from './words.js';

let made = 0;

/** One notebook's virtual GPUs. */
export interface Folded {
  key: string;
  name: string;
  views: View[];
  /** It is open where the reader has not said. */
  standing: boolean;
}

/** What stands for itself, and what is folded: virtual GPUs that only their own kernel can use. */
export function fold(views: readonly View[], shared: Shared): [View[], Folded[]] {
  const { here, t } = shared;
  const folds = new Map<string, Folded>();
  const shown: View[] = [];
  for (const view of views) {
    const [process] = view.processes;
    if (!view.gpu.virtual || !process || owner(process, here) === 'mine') {
      shown.push(view);
      continue;
    }
    const key = process.kernel ?? process.notebook ?? `pid ${process.pid}`;
    const name = process.notebook
      ? file(process.notebook)
      : `${process.name ?? ''} ${t('pid %1', process.pid)}`.trim();
    const found = folds.get(key) ?? { key: `fold ${key}`, name, views: [], standing: false };
    found.views.push(view);
    folds.set(key, found);
  }
  const all = [...folds.values()];
  // Where there is nothing else to see, it is what one wants to see.
  const [only] = all;
  if (only && all.length === 1 && !shown.length) only.standing = true;
  return [shown, all];
}

/** What shows the GPUs; nothing where they are none. */
interface List {
  readonly node: HTMLElement;
  update(views: View[]): void;
  draw(): void;
}

export class Fold {
  readonly node: HTMLElement;
  #shared: Shared;
  #button: HTMLButtonElement;
  #name = new Field('b');
  #note = new Field('span', 'dim');
  #list: List;
  #folded: Folded | null = null;

  constructor(shared: Shared, list: List) {
    this.#shared = shared;
    this.#list = list;
    list.node.id = `fold-${made++}`;
    this.#button = h('button', 'open', icon(CHEVRON), this.#name.node);
    this.#button.type = 'button';
    this.#button.setAttribute('aria-controls', list.node.id);
    const head = h('div', 'head', this.#button, this.#note.node);
    head.addEventListener('click', () => this.#toggle());
    this.node = h('li', 'fold', head, list.node);
  }

  update(folded: Folded): void {
    const { t, open } = this.#shared;
    const { name, views } = folded;
    this.#folded = folded;
    const held = views.reduce((sum, { gpu }) => sum + (gpu.memory_used ?? 0), 0);
    this.#name.say(name).hint(views[0]?.processes[0]?.notebook ?? name);
    this.#note.say(`${t('%1 virtual', views.length)} · ${size(held)}`);
    const isOpen = open.get(folded.key) ?? folded.standing;
    if (this.#button.ariaExpanded !== String(isOpen)) this.#button.ariaExpanded = String(isOpen);
    this.#list.update(isOpen ? views : []);
    show(this.#list.node, isOpen);
  }

  draw(): void {
    this.#list.draw();
  }

  dispose(): void {
    this.#list.update([]);
  }

  #toggle(): void {
    if (!this.#folded) return;
    const { open } = this.#shared;
    const { key, standing } = this.#folded;
    open.set(key, !(open.get(key) ?? standing));
    this.update(this.#folded);
    this.#shared.toggled();
  }
}

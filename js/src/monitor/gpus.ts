/** List the GPUs of one host, with a summary and their order. */

import type { ProcessSample, Snapshot } from '../snapshot.js';
import type { Sight } from './browser.js';
import { CHEVRON, Field, h, icon, Rows, show } from './dom.js';
import { Card } from './gpu-row.js';
import { file } from './names.js';
import { Overview } from './overview.js';
import { owner, type View, views, whole } from './owners.js';
import { Processes } from './processes.js';
import type { Density, Shared } from './shared.js';
import { size } from './units.js';

/** From so many percent on it is busy. */
const BUSY = 5;
/** Up to this share of its memory, an idle one is free. */
const FREE = 0.05;

const SORT =
  'M5 3v10M2.500 10.500l2.500 2.500l2.500-2.500M11 13v-10M8.500 5.500l2.500-2.500l2.500 2.500';
const ORDERS = ['number', 'utilization', 'memory', 'free', 'temperature'] as const;
type Order = (typeof ORDERS)[number];
/** The greatest first; what is not known last. */
const RANK: Record<Order, (view: View) => number | null> = {
  number: () => 0,
  utilization: ({ gpu }) => gpu.utilization,
  memory: ({ gpu }) => gpu.memory_used,
  free: ({ parts }) => (parts.known ? parts.free : null),
  temperature: ({ gpu }) => gpu.temperature,
};

/** "8 GPUs · 6 busy · 1 free · 296 GiB held". */
export function summary(views: readonly View[], { t }: Pick<Shared, 't'>): string {
  const gpus = views.map(({ gpu }) => gpu).filter((gpu) => !gpu.lost);
  const busy = gpus.filter((gpu) => (gpu.utilization ?? 0) >= BUSY);
  const free = gpus.filter(
    ({ utilization, memory_used: used, memory_total: total }) =>
      utilization !== null && utilization < BUSY && used !== null && used <= FREE * (total ?? 0),
  );
  const known = gpus.filter((gpu) => gpu.memory_used !== null);
  const held = known.reduce((sum, gpu) => sum + (gpu.memory_used ?? 0), 0);
  const lost = views.length - gpus.length;
  return [
    t('%1 GPUs', views.length),
    lost ? t('%1 lost', lost) : '',
    t('%1 busy', busy.length),
    t('%1 free', free.length),
    known.length ? t('%1 held', size(held)) : '',
  ]
    .filter(Boolean)
    .join(' · ');
}

export class Summary {
  readonly node: HTMLElement;
  #shared: Shared;
  #text = new Field();
  #order = new Field('span', 'dim');
  #select = h('select');
  #names: Record<Order, string>;

  constructor(shared: Shared, changed: () => void) {
    const { t } = shared;
    this.#names = {
      number: t('by number'),
      utilization: t('by utilization'),
      memory: t('by memory held'),
      free: t('by free memory'),
      temperature: t('by temperature'),
    };
    this.#shared = shared;
    for (const order of ORDERS) {
      const option = h('option', '', this.#names[order]);
      option.value = order;
      this.#select.append(option);
    }
    this.#select.ariaLabel = t('Order of the GPUs');
    this.#select.addEventListener('change', changed);
    const order = h('label', 'order', this.#order.node, icon(SORT), this.#select);
    order.title = t('Order of the GPUs');
    this.node = h('div', 'summary', this.#text.node, order);
  }

  update(views: readonly View[], lines: boolean): void {
    show(this.node, views.length > 1 && lines);
    this.#text.say(summary(views, this.#shared));
    const order = this.#select.value as Order;
    this.#order.say(order === 'number' ? '' : this.#names[order]);
  }

  /** This notebook's first, then in the order that the reader chose. */
  order(views: readonly View[]): View[] {
    const rank = RANK[this.#select.value as Order] ?? RANK.number;
    const least = Number.NEGATIVE_INFINITY;
    return [...views].sort(
      (a, b) =>
        Number(b.parts.mine > 0) - Number(a.parts.mine > 0) ||
        (rank(b) ?? least) - (rank(a) ?? least) ||
        0,
    );
  }
}

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
interface Content {
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
  #list: Content;
  #folded: Folded | null = null;

  constructor(shared: Shared, list: Content) {
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

/** So many are lines, where the reader did not choose. */
const LINES = 4;
/** Pixels: a card with two holders, its least width with the gap, what is above and below all. */
const [HIGH, WIDE, AROUND] = [149, 260, 90];
/** More than so many, and who holds them is told before them. */
const MANY = 8;
/** So many of this notebook's lines stand open. */
const OPEN = 2;

/** Cards or lines of some GPUs, made anew when it is the other. */
class List {
  readonly node = h('ul', 'gpus');
  #shared: Shared;
  #sight: Sight;
  #cards: Rows<View, Card> | null = null;
  #lines = false;

  constructor(shared: Shared, sight: Sight, label: string) {
    this.#shared = shared;
    this.#sight = sight;
    this.node.setAttribute('aria-label', label);
  }

  update(views: readonly View[], lines: boolean): void {
    if (!this.#cards || lines !== this.#lines) {
      this.#cards?.update([]);
      this.#lines = lines;
      this.node.className = lines ? 'gpus lines' : 'gpus';
      this.#cards = new Rows(this.node, (view) => new Card(view, lines, this.#shared, this.#sight));
    }
    this.#cards.update(views.map((view) => [view.gpu.uuid, view] as const));
  }

  draw(): void {
    for (const card of this.#cards?.rows ?? []) card.draw();
  }
}

export class Gpus {
  readonly node = h('div');
  density: Density = 'auto';
  /** Whether they are lines now. */
  lines = false;
  #shared: Shared;
  #summary: Summary;
  #list: List;
  #folds: Rows<Folded, Fold>;
  #held: Processes;
  #holders: HTMLElement;
  #order: string[] = [];
  #overview: Overview | null = null;

  /** `wide`: as a page, with all GPUs in one chart. */
  constructor(shared: Shared, sight: Sight, wide: boolean, changed: () => void) {
    const { t } = shared;
    this.#shared = shared;
    this.#summary = new Summary(shared, () => {
      this.#order = [];
      changed();
    });
    this.#list = new List(shared, sight, t('GPUs'));
    this.#folds = new Rows(h('ul', 'folds'), (folded) => this.#fold(folded, sight));
    this.#held = new Processes(shared, t('Held by'));
    this.#holders = h('section', 'held', h('h2', '', t('Held by')), this.#held.node);
    this.node.append(this.#summary.node, this.#list.node, this.#folds.node, this.#holders);
    if (!wide) return;
    this.#overview = new Overview(shared);
    this.node.prepend(this.#overview.node);
  }

  /** Returns what it shows; of all hosts there are so many GPUs. */
  update(snapshot: Snapshot, of: number): View[] {
    const all = views(snapshot, this.#shared.here);
    this.#remember(all);
    const [shown, folds] = fold(all, this.#shared);
    const elsewhere = of - whole(snapshot.gpus).length;
    const auto = this.density === 'auto';
    this.lines = auto ? this.#crowded(shown.length + elsewhere) : this.density === 'lines';
    const mine = shown.filter(({ parts }) => parts.mine > 0);
    if (this.lines && mine.length <= OPEN) for (const view of mine) view.standing = true;
    this.#overview?.update(shown);
    this.#summary.update(shown, this.lines);
    this.#list.update(this.lines ? this.#ordered(shown) : shown, this.lines);
    this.#folds.update(folds.map((folded) => [folded.key, folded] as const));
    show(this.#folds.node, folds.length > 0);
    this.#hold(shown);
    return all;
  }

  draw(): void {
    this.#overview?.draw();
    this.#list.draw();
    for (const fold of this.#folds.rows) fold.draw();
  }

  dispose(): void {
    this.#overview?.dispose();
    this.#list.update([], this.lines);
    this.#folds.update([]);
  }

  /** Whether so many are too many for cards. */
  #crowded(count: number): boolean {
    if (count < 2 || count >= LINES) return count >= LINES;
    // Of a host that shows it all, or of what is not shown yet.
    const room = this.#shared.actions.room?.() || Number.POSITIVE_INFINITY;
    const columns = Math.max(1, Math.floor(this.node.clientWidth / WIDE));
    return AROUND + HIGH * Math.ceil(count / columns) > room;
  }

  /** A card says who holds its memory; of lines one wants to know it of all at once. */
  #hold(shown: readonly View[]): void {
    const held: ProcessSample[] = this.lines
      ? shown.flatMap(({ processes, migs }) => [
          ...migs.flatMap((mig) => mig.processes),
          ...processes,
        ])
      : [];
    const unseen = this.lines ? shown.reduce((sum, view) => sum + view.unseen, 0) : 0;
    const first = shown.length > MANY;
    this.#held.update(held, unseen, !first);
    show(this.#holders, held.length > 0 || unseen > 0);
    if (first === (this.#holders.nextSibling === this.#list.node)) return;
    if (first) this.#list.node.before(this.#holders);
    else this.node.append(this.#holders);
  }

  /** Not while the pointer is on them: what one is about to press must not go away. */
  #ordered(shown: readonly View[]): View[] {
    const ordered = this.#summary.order(shown);
    const still = this.#list.node.matches(':hover') && this.#order.length === shown.length;
    if (still) {
      const place = new Map(this.#order.map((uuid, n) => [uuid, n]));
      const at = ({ gpu }: View): number => place.get(gpu.uuid) ?? shown.length;
      return ordered.sort((a, b) => at(a) - at(b));
    }
    this.#order = ordered.map(({ gpu }) => gpu.uuid);
    return ordered;
  }

  #fold({ name }: Folded, sight: Sight): Fold {
    const list = new List(this.#shared, sight, this.#shared.t('GPUs of %1', name));
    return new Fold(this.#shared, {
      node: list.node,
      update: (views) => list.update(views, true),
      draw: () => list.draw(),
    });
  }

  #remember(all: readonly View[]): void {
    const { were } = this.#shared;
    for (const { gpu, processes } of all) {
      const books = processes.flatMap(({ notebook }) => (notebook ? [file(notebook)] : []));
      if (books.length && !gpu.lost) were.set(gpu.uuid, [...new Set(books)]);
    }
  }
}

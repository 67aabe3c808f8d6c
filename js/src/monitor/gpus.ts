/** The list of GPUs: cards, or where there are many lines, of which this notebook's stand first. */

import type { ProcessSample, Snapshot } from '../snapshot.js';
import { Card } from './card.js';
import { h, Rows, show } from './dom.js';
import { Fold, type Folded, fold } from './fold.js';
import { Overview } from './overview.js';
import type { Sight } from './page.js';
import { Processes } from './processes.js';
import type { Density, Shared } from './shared.js';
import { type View, views, whole } from './split.js';
import { Summary } from './summary.js';
import { file } from './words.js';

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

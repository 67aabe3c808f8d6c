/** Create elements once and write to the page only what changed. */

import type { Badge } from './names.js';

const SVG = 'http://www.w3.org/2000/svg';

/** An element with a class and children. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  css = '',
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  if (css) node.className = css;
  node.append(...children);
  return node;
}

export const CHEVRON = 'M6 4l4 4-4 4';

/** A picture of strokes in a field of 16 by 16. */
export function icon(path: string): SVGElement {
  const svg = document.createElementNS(SVG, 'svg');
  const line = document.createElementNS(SVG, 'path');
  svg.setAttribute('viewBox', '0 0 16 16');
  svg.setAttribute('aria-hidden', 'true');
  line.setAttribute('d', path);
  svg.append(line);
  return svg;
}

/** An element whose text, class, title and presence change; each is written only when different. */
export class Field {
  readonly node: HTMLElement;
  #text = document.createTextNode('');
  #said = '';
  #css: string;
  #title = '';

  constructor(tag: keyof HTMLElementTagNameMap = 'span', css = '') {
    this.node = h(tag, css, this.#text);
    this.#css = css;
  }

  say(text: string): this {
    if (text !== this.#said) this.#text.data = this.#said = text;
    return this;
  }

  /** As `say`, but hidden where there is nothing to say. */
  offer(text: string): this {
    show(this.node, text !== '');
    return this.say(text);
  }

  look(css: string): this {
    if (css !== this.#css) this.node.className = this.#css = css;
    return this;
  }

  hint(title: string): this {
    if (title !== this.#title) this.node.title = this.#title = title;
    return this;
  }
}

/** Shows or hides; writes only when different. */
export function show(node: HTMLElement, on: boolean): void {
  if (node.hidden === on) node.hidden = !on;
}

interface Row<T> {
  readonly node: HTMLElement;
  update(item: T): void;
  dispose?(): void;
}

/** Children that follow a list of keyed items: kept, moved, made, removed. */
export class Rows<T, R extends Row<T>> {
  readonly node: HTMLElement;
  readonly #make: (item: T) => R;
  #rows = new Map<string, R>();

  constructor(node: HTMLElement, make: (item: T) => R) {
    this.node = node;
    this.#make = make;
    // Without a marker in the list, Safari tells no screen reader that it is one.
    if (node.tagName === 'UL') node.setAttribute('role', 'list');
  }

  get rows(): Iterable<R> {
    return this.#rows.values();
  }

  update(items: Iterable<readonly [string, T]>): void {
    const kept = new Map<string, R>();
    let next = this.node.firstChild;
    for (const [key, item] of items) {
      if (kept.has(key)) continue;
      const row = this.#rows.get(key) ?? this.#make(item);
      kept.set(key, row);
      row.update(item);
      if (row.node === next) next = next.nextSibling;
      else this.node.insertBefore(row.node, next);
    }
    for (const [key, row] of this.#rows) {
      if (kept.has(key)) continue;
      row.dispose?.();
      row.node.remove();
    }
    this.#rows = kept;
  }
}

// What can be typed, as gpumagic/gputable/gpu_table.py marks it too.
const TYPED =
  /(%load_ext gpumagic|%gpus(?: --\w+)*(?: \d+)?|pip (?:un)?install [\w -]+|[A-Z]{2,}_[A-Z_]+|--gpus all|`[^`]+`)/;

/** Text in which what can be typed is code. */
export function typed(text: string): Node[] {
  return text
    .split(TYPED)
    .filter(Boolean)
    .map((part) =>
      TYPED.test(part) ? h('code', '', part.replaceAll('`', '')) : document.createTextNode(part),
    );
}

/** Text that breaks only between its parts. */
export function parts(text: string): (Node | string)[] {
  return text
    .split(/(?<= ·) /)
    .flatMap((part, n) => (n ? [' ', h('span', 'part', part)] : [h('span', 'part', part)]));
}

/** With a capital, if it does not begin with something to type, and a full stop. */
export function sentence(text: string): string {
  return text && `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? '' : '.'}`;
}

class BadgeNode {
  #field = new Field();
  readonly node = this.#field.node;

  update([text, look]: Badge): void {
    this.#field.say(text).look(`badge ${look}`).hint(text);
  }
}

export class Badges {
  readonly node = h('span', 'badges');
  #rows = new Rows<Badge, BadgeNode>(this.node, () => new BadgeNode());

  update(badges: Badge[]): void {
    this.#rows.update(badges.map((badge, n) => [String(n), badge] as const));
    show(this.node, badges.length > 0);
  }
}

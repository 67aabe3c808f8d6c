/** Create elements once, and write to the page only what changed. */

import type { Badge } from './names.js';

const SVG = 'http://www.w3.org/2000/svg';

/** Create an element with a class and children. */
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

/** Create a button that does not submit a form. */
export function button(
  css: string,
  pressed: () => void,
  ...children: (Node | string)[]
): HTMLButtonElement {
  const node = h('button', css, ...children);
  node.type = 'button';
  node.addEventListener('click', pressed);
  return node;
}

export const CHEVRON = 'M6 4l4 4-4 4';

/** Create an icon of strokes; the view box is 16 by 16. */
export function icon(path: string): SVGElement {
  const svg = document.createElementNS(SVG, 'svg');
  const line = document.createElementNS(SVG, 'path');
  svg.setAttribute('viewBox', '0 0 16 16');
  svg.setAttribute('aria-hidden', 'true');
  line.setAttribute('d', path);
  svg.append(line);
  return svg;
}

/** An element whose text, class, title and visibility are written only when they change. */
export class Field {
  readonly node: HTMLElement;
  #text = document.createTextNode('');

  constructor(tag: keyof HTMLElementTagNameMap = 'span', css = '') {
    this.node = h(tag, css, this.#text);
  }

  text(text: string): this {
    if (text !== this.#text.data) this.#text.data = text;
    return this;
  }

  textOrHide(text: string): this {
    show(this.node, text !== '');
    return this.text(text);
  }

  className(css: string): this {
    if (css !== this.node.className) this.node.className = css;
    return this;
  }

  title(title: string): this {
    if (title !== this.node.title) this.node.title = title;
    return this;
  }
}

/** Show or hide an element. */
export function show(node: HTMLElement, on: boolean): void {
  if (node.hidden === on) node.hidden = !on;
}

/** Mark a button as open or closed for screen readers. */
export function expand(button: HTMLElement, open: boolean): void {
  if (button.ariaExpanded !== String(open)) button.ariaExpanded = String(open);
}

interface Row<T> {
  readonly node: HTMLElement;
  /** Absent if it never changes. */
  update?(item: T): void;
}

/** The children of `node`, one for each keyed item; they are reused, moved, created and removed. */
export class Rows<T, R extends Row<T>> {
  readonly node: HTMLElement;
  readonly #make: (item: T) => R;
  #rows = new Map<string, R>();

  constructor(node: HTMLElement, make: (item: T) => R) {
    this.node = node;
    this.#make = make;
    // Safari tells screen readers about a list without markers only if it has this role.
    if (node.tagName === 'UL') node.setAttribute('role', 'list');
  }

  get rows(): Iterable<R> {
    return this.#rows.values();
  }

  /** Update the rows; `steady`: those under the pointer keep their order, for a click. */
  update(items: readonly T[], keyOf: (item: T, n: number) => string, steady = false): void {
    const used = new Map<string, R>();
    let next = this.node.firstChild;
    const all = items.map((item, n) => [keyOf(item, n), item] as const);
    if (steady && this.node.matches(':hover')) {
      const before = [...this.#rows.keys()];
      const at = (key: string): number => before.indexOf(key) + 1 || Number.POSITIVE_INFINITY;
      all.sort(([a], [b]) => at(a) - at(b) || 0);
    }
    for (const [key, item] of all) {
      if (used.has(key)) continue;
      const row = this.#rows.get(key) ?? this.#make(item);
      used.set(key, row);
      row.update?.(item);
      if (row.node === next) next = next.nextSibling;
      else this.node.insertBefore(row.node, next);
    }
    for (const [key, row] of this.#rows) if (!used.has(key)) row.node.remove();
    this.#rows = used;
  }
}

/** Words in a frame; hidden if there are none. */
export class Badges {
  readonly node = h('span', 'badges');
  #rows = new Rows(this.node, () => {
    const field = new Field();
    return {
      node: field.node,
      update: ([text, tone]: Badge) => field.text(text).className(`badge ${tone}`).title(text),
    };
  });

  update(badges: Badge[]): void {
    this.#rows.update(badges, (_, n) => String(n));
    show(this.node, badges.length > 0);
  }
}

// Text to type; gpumagic/gputable/gpu_table.py has the same pattern.
const TYPED =
  /(%load_ext gpumagic|%gpus(?: --\w+)*(?: \d+)?|pip (?:un)?install [\w -]+|[A-Z]{2,}_[A-Z_]+|--gpus all|`[^`]+`)/;

/** Split a text into nodes, in which text to type is code. */
export function typed(text: string): Node[] {
  return text
    .split(TYPED)
    .filter(Boolean)
    .map((part) =>
      TYPED.test(part) ? h('code', '', part.replaceAll('`', '')) : document.createTextNode(part),
    );
}

/** Sentences in which text to type is code; written only when they change. */
export class Prose {
  readonly node: HTMLElement;
  #shown = '';

  constructor(tag: keyof HTMLElementTagNameMap, css = '') {
    this.node = h(tag, css);
  }

  /** Set the sentences, each with its class; empty ones are left out. */
  set(...all: (readonly [css: string, text: string])[]): void {
    const shown = all.join();
    if (shown === this.#shown) return;
    this.#shown = shown;
    const some = all.filter(([, text]) => text);
    const nodes = some.flatMap(([css, text], n) => [n ? ' ' : '', h('span', css, ...typed(text))]);
    this.node.replaceChildren(...nodes);
  }
}

/** Split a text into nodes, so that lines break only after " ·". */
export const parts = (text: string): (Node | string)[] =>
  text.split(/(?<= ·) /).flatMap((part, n) => [n ? ' ' : '', h('span', 'part', part)]);

/** Return the text with a capital and a full stop. */
export const sentence = (text: string): string =>
  text && `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? '' : '.'}`;

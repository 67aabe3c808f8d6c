/** Observe the page around a monitor: its theme, the sizes of boxes, and what is on the screen. */

import { h } from './dom.js';
import { OWNERS } from './owners.js';
import type { Inks } from './spark.js';

const INKS = [...OWNERS, 'busy', 'mark', 'rule'] as const;

/** Create an element with a child for each color, from which `inks` reads it. */
export const probe = (): HTMLElement => h('i', 'probe', ...INKS.map((name) => h('i', name)));

/** Read the current colors of the style sheet. */
export const inks = (probe: HTMLElement): Inks =>
  Object.fromEntries(
    INKS.map((name, n) => [name, getComputedStyle(probe.children[n] as Element).color]),
  ) as Inks;

/** Call after each possible change of colors; return a function that stops it. */
export function onTheme(call: () => void): () => void {
  const observer = new MutationObserver(call);
  for (const node of [document.documentElement, document.body])
    observer.observe(node, { attributes: true });
  const queries = ['(prefers-color-scheme: dark)', '(forced-colors: active)'].map((query) =>
    globalThis.matchMedia?.(query),
  );
  for (const query of queries) query?.addEventListener('change', call);
  return () => {
    observer.disconnect();
    for (const query of queries) query?.removeEventListener('change', call);
  };
}

type Observer = IntersectionObserver | ResizeObserver;

/** Watches elements, each with a function that gets its entries. */
export class Watch<E extends IntersectionObserverEntry | ResizeObserverEntry> {
  #calls = new Map<Element, (entry: E) => void>();
  #observer: Observer | null;

  /** `Observer` is undefined where the browser has none; `after` is called after the entries. */
  constructor(
    Observer: (new (call: (entries: E[]) => void) => Observer) | undefined,
    after = () => {},
  ) {
    const take = (entries: E[]): void => {
      for (const entry of entries) this.#calls.get(entry.target)?.(entry);
      after();
    };
    this.#observer = Observer ? new Observer(take) : null;
  }

  add(node: Element, call: (entry: E) => void): void {
    this.#calls.set(node, call);
    this.#observer?.observe(node);
  }

  remove(node: Element): void {
    this.#calls.delete(node);
    this.#observer?.unobserve(node);
  }

  dispose(): void {
    this.#observer?.disconnect();
  }
}

/** Tells elements when they enter or leave the screen. */
export type Visibility = Watch<IntersectionObserverEntry>;

const KEY = 'gpumagic:open';

/** Load what the user opened and closed in this tab. */
export function remembered(): Map<string, boolean> {
  try {
    return new Map(JSON.parse(sessionStorage.getItem(KEY) ?? '[]') as [string, boolean][]);
  } catch {
    return new Map();
  }
}

export function remember(open: Map<string, boolean>): void {
  try {
    sessionStorage.setItem(KEY, JSON.stringify([...open]));
  } catch {
    // A frame without storage forgets.
  }
}

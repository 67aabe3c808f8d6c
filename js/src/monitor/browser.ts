/** What the page does around a monitor: its theme, the sizes of boxes, what is on the screen. */

import { h } from './dom.js';
import { OWNERS } from './owners.js';
import type { Inks, Spark } from './spark.js';

const INKS = [...OWNERS, 'busy', 'mark', 'rule'] as const;

/** An element with a child for each color, from which `inks` reads it. */
export const probe = (): HTMLElement => h('i', 'probe', ...INKS.map((name) => h('i', name)));

/** The colors that CSS gives now. */
export function inks(probe: HTMLElement): Inks {
  const colors = INKS.map((name, n) => {
    const child = probe.children[n];
    return [name, child ? getComputedStyle(child).backgroundColor : ''];
  });
  return Object.fromEntries(colors) as Inks;
}

const ATTRIBUTES = ['class', 'style', 'data-jp-theme-name', 'data-jp-theme-light', 'data-theme'];

/** Calls when the colors may have changed; the value ends it. */
export function onTheme(call: () => void): () => void {
  const observer = new MutationObserver(call);
  for (const node of [document.documentElement, document.body]) {
    observer.observe(node, { attributes: true, attributeFilter: ATTRIBUTES });
  }
  const wishes = ['(prefers-color-scheme: dark)', '(forced-colors: active)'].map((wish) =>
    globalThis.matchMedia?.(wish),
  );
  for (const wish of wishes) wish?.addEventListener('change', call);
  return () => {
    observer.disconnect();
    for (const wish of wishes) wish?.removeEventListener('change', call);
  };
}

/** Tells charts the size of their boxes, and `changed` that some are to be drawn again. */
export class Sizes {
  #sparks = new Map<Element, Spark>();
  #observer: ResizeObserver | null = null;

  constructor(changed: () => void) {
    if (typeof ResizeObserver === 'undefined') return;
    this.#observer = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) {
        this.#sparks.get(target)?.resize(contentRect.width, contentRect.height);
      }
      changed();
    });
  }

  watch(spark: Spark): void {
    this.#sparks.set(spark.node, spark);
    this.#observer?.observe(spark.node);
  }

  unwatch(spark: Spark): void {
    this.#sparks.delete(spark.node);
    this.#observer?.unobserve(spark.node);
  }

  dispose(): void {
    this.#observer?.disconnect();
    this.#sparks.clear();
  }
}

/** Tells each of some elements whether it is on the screen. */
export class Sight {
  #calls = new Map<Element, (visible: boolean) => void>();
  #observer: IntersectionObserver | null = null;

  constructor() {
    if (typeof IntersectionObserver === 'undefined') return;
    this.#observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) this.#calls.get(target)?.(isIntersecting);
    });
  }

  watch(node: Element, call: (visible: boolean) => void): void {
    this.#calls.set(node, call);
    this.#observer?.observe(node);
  }

  unwatch(node: Element): void {
    this.#calls.delete(node);
    this.#observer?.unobserve(node);
  }

  dispose(): void {
    this.#observer?.disconnect();
    this.#calls.clear();
  }
}

const KEY = 'gpumagic:open';

/** What the reader opened and closed in this tab. */
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

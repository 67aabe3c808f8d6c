/** Read the theme's colors, and remember in this tab what the user opened. */

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

const KEY = 'gpumagic:open';

/** What the user opened (true) or closed (false), by key; also after a reload of the page. */
export class Opened {
  #changed: () => void;
  #all: Map<string, boolean>;

  constructor(changed: () => void) {
    this.#changed = changed;
    this.#all = load();
  }

  get(key: string): boolean | undefined {
    return this.#all.get(key);
  }

  set(key: string, open: boolean): void {
    this.#all.set(key, open);
    try {
      sessionStorage.setItem(KEY, JSON.stringify([...this.#all]));
    } catch {
      // A frame without storage forgets.
    }
    this.#changed();
  }
}

function load(): Map<string, boolean> {
  try {
    return new Map(JSON.parse(sessionStorage.getItem(KEY) ?? '[]') as [string, boolean][]);
  } catch {
    return new Map();
  }
}

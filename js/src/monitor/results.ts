/** Results that bring their own text and HTML, newest first, below what is measured now. */

import type { Result, Timing, TimingBar } from '../snapshot.js';
import { Pace } from './bars.js';
import { Field, h, Rows, show } from './dom.js';

const ACTIVE = 'script,iframe,object,embed,link,base,meta,form';

/** HTML of our own kernel, with what could act or load taken out all the same. */
export function quiet(html: string): Node[] {
  const page = new DOMParser().parseFromString(html, 'text/html');
  for (const node of page.querySelectorAll(ACTIVE)) node.remove();
  for (const node of page.querySelectorAll('*')) {
    for (const { name, value } of [...node.attributes]) {
      if (/^on/i.test(name) || /^\s*(javascript:|data:text)/i.test(value))
        node.removeAttribute(name);
    }
  }
  return [...page.head.childNodes, ...page.body.childNodes];
}

/** "14:05". */
const clock = (time: number): string =>
  new Date(time * 1000).toLocaleTimeString([], {
    hour: '2-digit',
    minute: '2-digit',
    hourCycle: 'h23',
  });

/** What a comparison says first: all before its code, which is indented. */
export const verdict = (text: string): string =>
  (text.split(/\n {2}|\n\n/)[0] ?? '').replaceAll('\n', ' · ');

class ResultRow {
  readonly node = h('li');

  constructor({ title, time, text, html }: Result) {
    const content = h('div', 'result');
    // Its styles are its own.
    if (html) content.attachShadow({ mode: 'open' }).append(...quiet(html));
    else content.append(h('pre', '', text));
    const summary = h('summary', '', h('span', 'title', title), h('span', 'dim', clock(time)));
    const said = verdict(text);
    if (said) summary.append(h('span', 'verdict', said));
    summary.title = said;
    this.node.append(h('details', '', summary, content));
  }

  update(): void {}
}

export class Results {
  readonly node: HTMLElement;
  #rows = new Rows<Result, ResultRow>(h('ul'), (result) => new ResultRow(result));
  #line = new Field('div', 'dim');
  #bars = new Rows<TimingBar, Pace>(h('div', 'paces'), () => new Pace());
  #some = false;

  constructor(title: string) {
    const now = [this.#line.node, this.#bars.node];
    this.node = h('section', 'results', h('h2', '', title), ...now, this.#rows.node);
    this.now({});
  }

  /** What is measured now. */
  now({ line = '', bars = [] }: Timing): void {
    this.#line.offer(line);
    this.#bars.update(bars.map((bar) => [bar.where, bar] as const));
    show(this.node, this.#some || line !== '');
  }

  update(results: Result[]): void {
    const sorted = [...results].sort((a, b) => b.time - a.time);
    this.#rows.update(sorted.map((result) => [result.id, result] as const));
    this.#some = results.length > 0;
    show(this.node, this.#some || this.#line.node.hidden === false);
  }
}

/** List results, newest first, below the progress of a running measurement. */

import type { Result, Timing, TimingBar } from '../snapshot.js';
import { TimingRow } from './bars.js';
import { Field, h, Rows, show } from './dom.js';

/** "14:05". */
const clock = (time: number): string =>
  new Date(time * 1000).toLocaleTimeString([], {
    hour: '2-digit',
    minute: '2-digit',
    hourCycle: 'h23',
  });

/** The answer of a comparison: the lines before its code, which is indented. */
const verdict = (text: string): string =>
  (text.split(/\n {2}|\n\n/)[0] ?? '').replaceAll('\n', ' · ');

const timingRows = () => new Rows(h('div', 'paces'), (_: TimingBar) => new TimingRow());
const whereOf = ({ where }: TimingBar): string => where;

class ResultRow {
  readonly node = h('li');

  constructor({ title, time, text, bars }: Result) {
    const drawn = timingRows();
    drawn.update(bars, whereOf);
    const summary = h('summary', '', h('span', 'title', title), h('span', 'dim', clock(time)));
    summary.title = verdict(text);
    summary.append(h('span', 'verdict', summary.title));
    this.node.append(h('details', '', summary, h('div', 'result', drawn.node, h('pre', '', text))));
  }
}

export class Results {
  readonly node: HTMLElement;
  #rows = new Rows(h('ul'), (result: Result) => new ResultRow(result));
  #line = new Field('div', 'dim');
  #bars = timingRows();

  constructor(title: string) {
    const now = [this.#line.node, this.#bars.node];
    this.node = h('section', 'results', h('h2', '', title), ...now, this.#rows.node);
  }

  update(results: Result[], { line = '', bars = [] }: Timing = {}): void {
    this.#line.textOrHide(line);
    this.#bars.update(bars, whereOf);
    this.#rows.update(
      [...results].sort((a, b) => b.time - a.time),
      ({ id }) => id,
    );
    show(this.node, results.length > 0 || line !== '');
  }
}

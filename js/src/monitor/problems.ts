/** Show problems and their cures. */

import type { Problem } from '../snapshot.js';
import { Field, h, Rows, sentence, show, typed } from './dom.js';

class ProblemRow {
  readonly node = h('li', 'problem');
  #shown = '';

  update({ cause, cure }: Problem): void {
    if (this.#shown === cause + cure) return;
    this.#shown = cause + cure;
    this.node.replaceChildren(h('b', '', ...typed(sentence(cause))), ' ', ...typed(sentence(cure)));
  }
}

export class Problems {
  readonly node: HTMLElement;
  #rows = new Rows(h('ul', 'problems'), (_: Problem) => new ProblemRow());
  #spoken = new Field('div', 'spoken');
  #known = '';

  constructor() {
    this.#spoken.node.setAttribute('role', 'status');
    this.node = h('div', '', this.#rows.node, this.#spoken.node);
  }

  update(problems: Problem[]): void {
    const keyOf = ({ code, uuid }: Problem): string => `${code} ${uuid}`;
    this.#rows.update(problems, keyOf);
    show(this.#rows.node, problems.length > 0);
    // Screen readers read a new problem, and not each change of its duration.
    const known = problems.map(keyOf).join();
    if (known === this.#known) return;
    this.#known = known;
    this.#spoken.text(
      problems.map(({ cause, cure }) => `${sentence(cause)} ${sentence(cure)}`).join(' '),
    );
  }
}

/** What is wrong and how to mend it: problems while there are GPUs, the doctor where there is none. */

import type { Check, Problem } from '../snapshot.js';
import { Field, h, Rows, sentence, show, typed } from './dom.js';
import type { Shared } from './shared.js';

class ProblemRow {
  readonly node = h('li', 'problem');
  #said = '';

  update({ cause, cure }: Problem): void {
    if (this.#said === cause + cure) return;
    this.#said = cause + cure;
    this.node.replaceChildren(h('b', '', ...typed(sentence(cause))), ' ', ...typed(sentence(cure)));
  }
}

export class Problems {
  readonly node = h('ul', 'problems');
  #rows = new Rows<Problem, ProblemRow>(this.node, () => new ProblemRow());

  constructor() {
    this.node.setAttribute('aria-live', 'polite');
  }

  update(problems: Problem[]): void {
    this.#rows.update(
      problems.map((problem) => [`${problem.code} ${problem.uuid}`, problem] as const),
    );
    show(this.node, problems.length > 0);
  }
}

class CheckRow {
  readonly node: HTMLElement;
  #mark = new Field('span', 'dim');
  #found = h('span');
  #said = '';

  constructor({ name }: Check) {
    this.#mark.node.setAttribute('role', 'img');
    this.node = h('li', 'check', this.#mark.node, h('b', '', name), this.#found);
  }

  update({ ok, found, cure }: Check): void {
    const [mark, look, word] =
      ok === null ? ['·', 'dim', 'neither'] : ok ? ['✓', 'good', 'right'] : ['✗', 'bad', 'wrong'];
    this.#mark.say(mark).look(look);
    if (this.#said === word + found + cure) return;
    this.#said = word + found + cure;
    this.#mark.node.setAttribute('aria-label', word);
    this.#found.replaceChildren(...typed(found));
    if (cure) this.#found.append(h('span', 'cure', '→ ', ...typed(cure)));
  }
}

export class Doctor {
  readonly node: HTMLElement;
  #checks = new Rows<Check, CheckRow>(h('ul', 'checks'), (check) => new CheckRow(check));
  #title = new Field('h2');
  #kind: HTMLElement;
  #shared: Shared;

  constructor(shared: Shared) {
    const { t, actions } = shared;
    this.#shared = shared;
    this.#kind = h(
      'p',
      'dim',
      ...typed(
        t(
          'No GPU is needed to try things out: type `%gpus --virtual 2` in a notebook for two virtual ones.',
        ),
      ),
    );
    this.node = h('section', 'doctor', this.#title.node, this.#checks.node, this.#kind);
    if (!actions.look) return;
    const again = h('button', 'again', t('Look again'));
    again.type = 'button';
    again.addEventListener('click', () => actions.look?.());
    this.node.append(again);
  }

  /** Checks, or null where none are known; `none` says that there is no GPU. */
  update(checks: Check[] | null, none: boolean): void {
    const { t } = this.#shared;
    show(this.node, none || checks !== null);
    this.#title.say(none ? t('No GPU is visible here') : t('Checks'));
    this.#checks.update((checks ?? []).map((check) => [check.name, check] as const));
    show(this.#kind, none);
  }
}

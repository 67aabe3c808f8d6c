/** What is wrong and how to fix it: problems while there are GPUs, the doctor where there is none. */

import type { Check, Problem } from '../snapshot.js';
import { Field, h, Rows, sentence, show, typed } from './dom.js';
import type { Shared, Translate } from './shared.js';

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
  readonly node: HTMLElement;
  #rows = new Rows<Problem, ProblemRow>(h('ul', 'problems'), () => new ProblemRow());
  #spoken = new Field('div', 'spoken');
  #known = '';

  constructor() {
    this.#spoken.node.setAttribute('role', 'status');
    this.node = h('div', '', this.#rows.node, this.#spoken.node);
    this.update([]);
  }

  update(problems: Problem[]): void {
    const rows = problems.map((problem) => [`${problem.code} ${problem.uuid}`, problem] as const);
    this.#rows.update(rows);
    show(this.#rows.node, problems.length > 0);
    // Read aloud when there is another problem, not when one says that it lasts a second longer.
    const known = rows.map(([key]) => key).join();
    if (known === this.#known) return;
    this.#known = known;
    this.#spoken.say(
      problems.map(({ cause, cure }) => `${sentence(cause)} ${sentence(cure)}`).join(' '),
    );
  }
}

class CheckRow {
  readonly node: HTMLElement;
  #mark = new Field('span', 'dim');
  #found = h('span');
  #said = '';
  #t: Translate;

  constructor({ name }: Check, t: Translate) {
    this.#t = t;
    this.#mark.node.setAttribute('role', 'img');
    this.node = h('li', 'check', this.#mark.node, h('b', '', name), this.#found);
  }

  update({ ok, found, cure }: Check): void {
    const t = this.#t;
    const [mark, look, word] =
      ok === null
        ? ['·', 'dim', t('neither right nor wrong')]
        : ok
          ? ['✓', 'good', t('right')]
          : ['✗', 'bad', t('wrong')];
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
  #checks: Rows<Check, CheckRow>;
  #title = new Field('h2');
  #kind: HTMLElement;
  #shared: Shared;

  constructor(shared: Shared) {
    const { t, actions } = shared;
    this.#shared = shared;
    this.#checks = new Rows(h('ul', 'checks'), (check) => new CheckRow(check, t));
    this.#kind = h(
      'p',
      'dim',
      ...typed(t('Without one, `%gpus --virtual 2` in a notebook makes two virtual ones.')),
    );
    this.node = h('section', 'doctor', this.#title.node, this.#checks.node, this.#kind);
    if (!actions.look) return;
    const again = h('button', 'again', t('Look again'));
    again.type = 'button';
    again.addEventListener('click', () => actions.look?.());
    this.node.append(again);
  }

  /** Checks, or null where none are known; `none` says that there is no GPU, `told` why. */
  update(checks: Check[] | null, none: boolean, told: Problem[]): void {
    const { t } = this.#shared;
    show(this.node, none || checks !== null);
    this.#title.say(none ? t('No GPU is visible here') : t('Checks'));
    this.#checks.update((checks ?? []).map((check) => [check.name, check] as const));
    // Once is enough.
    show(this.#kind, none && !told.some(({ cure }) => cure.includes('%gpus --virtual')));
  }
}

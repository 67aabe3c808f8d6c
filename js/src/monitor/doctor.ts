/** What is wrong and how to fix it: problems while there are GPUs, the doctor where there is none. */

import type { Check, Problem } from '../snapshot.js';
import { Field, h, Rows, sentence, show, typed } from './dom.js';
import { type Offer, OfferView } from './offer.js';
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
    this.node.classList.toggle('dim', ok === null);
    if (this.#said === word + found + cure) return;
    this.#said = word + found + cure;
    this.#mark.node.setAttribute('aria-label', word);
    this.#found.replaceChildren(...typed(found));
    if (cure) this.#found.append(h('span', 'cure', '→ ', ...typed(cure)));
  }
}

/** What a person without an NVIDIA card is told to do: that has a button here. */
const isOffered = (cure: string) => cure.includes('%gpus --virtual');

export class Doctor {
  readonly node: HTMLElement;
  #checks: Rows<Check, CheckRow>;
  #title = new Field('h2');
  #advice = h('p', 'advice');
  #advised = '';
  #offer: OfferView;
  #shared: Shared;

  constructor(shared: Shared) {
    const { t, actions } = shared;
    this.#shared = shared;
    this.#checks = new Rows(h('ul', 'checks'), (check) => new CheckRow(check, t));
    this.#offer = new OfferView(t);
    this.node = h(
      'section',
      'doctor',
      this.#title.node,
      this.#advice,
      this.#offer.node,
      this.#checks.node,
    );
    if (!actions.look) return;
    const again = h('button', 'again', t('Look again'));
    again.type = 'button';
    again.addEventListener('click', () => actions.look?.());
    this.node.append(again);
  }

  /** Checks, or null where none are known; `why` there is no GPU, null where there are some. */
  update(checks: Check[] | null, why: Problem[] | null, offer: Offer | null): void {
    const { t } = this.#shared;
    show(this.node, why !== null || checks !== null);
    this.#title.say(why ? t('No GPU is visible here') : t('Checks'));
    show(this.#offer.node, why !== null);
    if (why) this.#offer.update(offer);
    const first = checks?.find(({ ok }) => ok === false);
    // What a host offers has a button; what is not here is told above already.
    if (!why?.length || (first && isOffered(first.cure))) this.#advise('', '');
    else if (first) this.#advise(first.found, first.cure);
    else this.#advise(checks ? '' : (why[0]?.cause ?? ''), '');
    const shown = (checks ?? []).map((check) =>
      why && (check === first || isOffered(check.cure)) ? { ...check, cure: '' } : check,
    );
    this.#checks.update(shown.map((check) => [check.name, check] as const));
  }

  /** The first cause, and the one thing to do about it, above all else. */
  #advise(cause: string, cure: string): void {
    show(this.#advice, cause !== '');
    if (cause + cure === this.#advised) return;
    this.#advised = cause + cure;
    const [what, then] = [typed(sentence(cause)), typed(sentence(cure))];
    this.#advice.replaceChildren(...(cure ? [...what, ' ', h('b', '', ...then)] : what));
  }
}

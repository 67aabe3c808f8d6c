/** Show what is wrong and how to fix it: problems, the doctor’s checks, and what a host offers. */

import type { Check, Problem } from '../snapshot.js';
import { Field, h, Rows, sentence, show, typed } from './dom.js';
import type { Shared, Translate } from './shared.js';

export interface Button {
  label: string;
  /** What it will do, in a sentence. */
  hint: string;
  press(): void;
}

export interface Offer {
  /** The likeliest first. */
  buttons: Button[];
  /** Why it cannot be, how far it is, or what came of it. */
  said: string;
  /** Something was pressed, and is not done yet. */
  busy: boolean;
}

export const OFFER_CSS = `\
.advice{padding:0 0 8px}\
.check.dim .dim{opacity:1}\
.offer{padding:2px 0 10px}\
.offer p,.offer pre{overflow-wrap:anywhere;padding:2px 0}\
.offer pre{background:var(--track);border-radius:3px;margin:2px 0;padding:4px 8px;user-select:all}\
.offer button{border:1px solid var(--line);border-radius:4px;display:block;margin:6px 0;overflow-wrap:anywhere;padding:5px 12px;width:100%}\
.offer button:hover{background:var(--track)}\
.offer li:first-child button{background:var(--mine);border-color:var(--mine);color:var(--jp-ui-inverse-font-color1,#fff);font-weight:600}\
.offer li:first-child button:hover{filter:brightness(1.08)}\
.offer button:disabled{cursor:default;opacity:.6}\
@media(forced-colors:active){.offer li:first-child button{background:ButtonFace;color:ButtonText}}\
@container(min-width:460px){.offer button{width:auto}}\
`;

class ButtonRow {
  readonly node: HTMLElement;
  #button = h('button');
  #press = () => {};

  constructor() {
    this.#button.type = 'button';
    this.#button.addEventListener('click', () => this.#press());
    this.node = h('li', '', this.#button);
  }

  update({ label, hint, press }: Button): void {
    this.#press = press;
    // Written only when it changes: what is read aloud, or pressed, stays as it is.
    if (this.#button.textContent !== label) this.#button.textContent = label;
    if (this.#button.title !== hint) this.#button.title = hint;
  }

  enable(on: boolean): void {
    this.#button.disabled = !on;
  }
}

export class OfferView {
  readonly node: HTMLElement;
  #rows = new Rows<Button, ButtonRow>(h('ul'), () => new ButtonRow());
  #said = new Field('p', 'said');

  constructor(t: Translate) {
    this.#said.node.setAttribute('role', 'status');
    this.node = h(
      'div',
      'offer',
      h(
        'p',
        'dim',
        ...typed(
          t(
            'Virtual GPUs stand in for real ones: true `cuda:1` tensors, true errors, the CPU’s speed.',
          ),
        ),
      ),
      this.#rows.node,
      this.#said.node,
      h('p', 'dim', t('or in a cell:')),
      h('pre', '', '%load_ext gpumagic\n%gpus --virtual 2'),
    );
  }

  update(offer: Offer | null): void {
    this.#rows.update((offer?.buttons ?? []).map((button, n) => [`${n}`, button] as const));
    for (const row of this.#rows.rows) row.enable(!offer?.busy);
    show(this.#rows.node, this.#rows.node.childElementCount > 0);
    this.#said.offer(offer?.said ?? '');
  }
}

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

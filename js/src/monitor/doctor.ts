/** Show what is wrong: problems, the doctor's checks, and without a GPU the offer of virtual ones. */

import type { Check, Problem } from '../snapshot.js';
import { button, Field, h, Rows, sentence, show, typed } from './dom.js';
import type { Offer, Shared, Translate } from './shared.js';

export const DOCTOR_CSS = `\
.doctor,.advice{padding-bottom:9px}\
.check{display:grid;gap:0 8px;grid-template-columns:12px 1fr;overflow-wrap:anywhere;padding:3px 0}.check.dim .dim{opacity:1}\
.check span:last-of-type{grid-column:2}\
.check>span:first-child{text-align:center}\
.cure{display:block;font-weight:600}\
.doctor p{padding-top:8px}\
.again:hover,.offer button:hover{background:var(--track)}.again{border:1px solid var(--line);margin-top:6px;padding:3px 10px}\
.offer{padding:2px 0 10px}\
.offer p,.offer pre{overflow-wrap:anywhere;padding:2px 0}\
.offer pre{background:var(--track);border-radius:3px;margin:2px 0;padding:4px 8px;user-select:all}\
.offer button{border:1px solid var(--line);border-radius:4px;display:block;margin:6px 0;overflow-wrap:anywhere;padding:5px 12px;width:100%}\
.offer li:first-child button{background:var(--own);border-color:var(--own);color:var(--jp-ui-inverse-font-color1,#fff);font-weight:600}\
.offer li:first-child button:hover{filter:brightness(1.08)}\
.offer button:disabled{cursor:default;opacity:.6}\
@media(forced-colors:active){.offer li:first-child button{background:ButtonFace;color:ButtonText}}\
@container(min-width:460px){.check{grid-template-columns:12px minmax(100px,190px) 1fr}.check span:last-of-type{grid-column:3}.offer button{width:auto}}\
`;

class CheckRow {
  readonly node: HTMLElement;
  #mark = new Field();
  #found = h('span');
  #shown = '';
  #trans: Translate;

  constructor({ name }: Check, trans: Translate) {
    this.#trans = trans;
    this.#mark.node.setAttribute('role', 'img');
    this.node = h('li', 'check', this.#mark.node, h('b', '', name), this.#found);
  }

  update({ ok, found, cure }: Check): void {
    const trans = this.#trans;
    const passed = ok ? ['✓', 'good', trans.__('passed')] : ['✗', 'bad', trans.__('failed')];
    const [mark, css, label] = (ok === null ? ['·', 'dim', trans.__('info')] : passed) as [
      string,
      string,
      string,
    ];
    this.node.classList.toggle('dim', ok === null);
    if (this.#shown === mark + found + cure) return;
    this.#shown = mark + found + cure;
    this.#mark.text(mark).className(css);
    this.#mark.node.ariaLabel = label;
    this.#found.replaceChildren(...typed(found));
    if (cure) this.#found.append(h('span', 'cure', '→ ', ...typed(cure)));
  }
}

/** What a host offers if there is no GPU: buttons, and a line about their progress. */
class OfferView {
  readonly node: HTMLElement;
  #list = h('ul');
  #buttons: HTMLButtonElement[] = [];
  #offer: Offer | null = null;
  #status = new Field('p');

  constructor(trans: Translate) {
    this.#status.node.setAttribute('role', 'status');
    const why = trans.__('Virtual GPUs are real `cuda:1` tensors and errors, computed by the CPU.');
    this.node = h(
      'div',
      'offer',
      h('p', 'dim', ...typed(why)),
      this.#list,
      this.#status.node,
      h('p', 'dim', trans.__('or in a cell:')),
      h('pre', '', '%load_ext gpumagic\n%gpus --virtual 2'),
    );
  }

  update(offer: Offer | null): void {
    this.#offer = offer;
    // The same elements, so that a button keeps the focus while its words change.
    for (const [n, { label, title }] of (offer?.buttons ?? []).entries()) {
      const made = this.#buttons[n] ?? button('', () => this.#offer?.buttons[n]?.press());
      if (made !== this.#buttons[n]) this.#list.append(h('li', '', made));
      this.#buttons[n] = made;
      Object.assign(made, { textContent: label, title, disabled: offer?.busy });
    }
    for (const extra of this.#buttons.splice(offer?.buttons.length ?? 0))
      extra.parentElement?.remove();
    this.#status.textOrHide(offer?.text ?? '');
  }
}

/** Whether a cure has a button here: virtual GPUs. */
const isOffered = (cure: string) => cure.includes('%gpus --virtual');

export class Doctor {
  readonly node: HTMLElement;
  #checks: Rows<Check, CheckRow>;
  #others: Rows<Check, CheckRow>;
  #folded: HTMLDetailsElement;
  #count = new Field('summary', 'dim');
  #title = new Field('h2');
  #advice = h('p', 'advice');
  #advised = '';
  #offer: OfferView;
  #shared: Shared;

  constructor(shared: Shared) {
    const { trans, actions } = shared;
    this.#shared = shared;
    const list = () => new Rows(h('ul', 'checks'), (check: Check) => new CheckRow(check, trans));
    [this.#checks, this.#others] = [list(), list()];
    this.#folded = h('details', '', this.#count.node, this.#others.node);
    this.#offer = new OfferView(trans);
    const nodes = [this.#title.node, this.#advice, this.#offer.node, this.#checks.node];
    nodes.push(this.#folded);
    if (actions.doctor)
      nodes.push(button('again', () => actions.doctor?.(), trans.__('Check again')));
    this.node = h('section', 'doctor', ...nodes);
    show(this.node, false);
  }

  /** Show the checks if known; `why` there is no GPU, null if there are GPUs. */
  update(why: Problem[] | null): void {
    const { trans, checks, offer } = this.#shared;
    show(this.node, why !== null || checks !== null);
    this.#title.text(why ? trans.__('No GPU is visible here') : trans.__('Checks'));
    show(this.#offer.node, why !== null);
    if (why) this.#offer.update(offer);
    const first = checks?.find(({ ok }) => ok === false);
    // The offer has buttons for its cures. The cure of the first failed check is the advice.
    if (first && why?.length && !isOffered(first.cure)) this.#advise(first.found, first.cure);
    else this.#advise(why?.[0]?.cause ?? '', '');
    const shown = (checks ?? []).map((check) =>
      why && (check === first || isOffered(check.cure)) ? { ...check, cure: '' } : check,
    );
    // Where the first failure explains all, the other checks are one line.
    const explains = (check: Check) => !why || !first || check.name === first.name;
    const others = shown.filter((check) => !explains(check));
    this.#checks.update(shown.filter(explains), ({ name }) => name);
    this.#others.update(others, ({ name }) => name);
    this.#count.text(trans._n('%1 more check', '%1 more checks', others.length));
    show(this.#folded, others.length > 0);
  }

  /** Show the first cause and its cure above everything else. */
  #advise(cause: string, cure: string): void {
    show(this.#advice, cause !== '');
    if (cause + cure === this.#advised) return;
    this.#advised = cause + cure;
    const [what, then] = [typed(sentence(cause)), typed(sentence(cure))];
    this.#advice.replaceChildren(...(cure ? [...what, ' ', h('b', '', ...then)] : what));
  }
}

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

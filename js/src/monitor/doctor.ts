/** Show what is wrong: problems, the doctor's checks, and without a GPU the offer of virtual ones. */

import type { Check, Problem, Snapshot } from '../snapshot.js';
import { button, Field, h, Prose, Rows, sentence, show, typed } from './dom.js';
import { broken } from './names.js';
import type { OfferButton, Shared, Translate } from './shared.js';

export const DOCTOR_CSS = `\
.doctor{padding-bottom:12px}.advice{padding-bottom:9px}\
.check{display:grid;gap:0 8px;grid-template-columns:12px 1fr;overflow-wrap:anywhere;padding:3px 0}\
.check>:last-child{grid-column:2}.check>:first-child{text-align:center}.check .cure{display:block}\
.cure{font-weight:600}\
.again:hover,.offer button:hover{background:var(--track)}.again{border:1px solid var(--line);margin-top:6px;padding:3px 10px}\
.offer{padding:2px 0 10px}\
.offer p,.offer pre{overflow-wrap:anywhere;padding:2px 0}\
.offer pre{background:var(--track);border-radius:3px;margin:2px 0;padding:4px 8px;user-select:all}\
.offer button{border:1px solid var(--line);border-radius:4px;display:block;margin:6px 0;overflow-wrap:anywhere;padding:5px 12px;width:100%}\
.offer li:first-child button{background:var(--own);border-color:var(--own);color:var(--jp-ui-inverse-font-color1,#fff);font-weight:600}\
.offer li:first-child button:hover{filter:brightness(1.08)}\
.offer button:disabled{cursor:default;opacity:.6}\
@media(forced-colors:active){.offer li:first-child button{background:ButtonFace;color:ButtonText}}\
@container(min-width:460px){.check{grid-template-columns:12px minmax(100px,190px) 1fr}.check>:last-child{grid-column:3}.offer button{width:auto}}\
`;

class CheckRow {
  readonly node: HTMLElement;
  #mark = new Field();
  #found = new Prose('span');
  #trans: Translate;

  constructor({ name }: Check, trans: Translate) {
    this.#trans = trans;
    this.#mark.node.setAttribute('role', 'img');
    this.node = h('li', 'check', this.#mark.node, h('b', '', name), this.#found.node);
  }

  update({ ok, found, cure }: Check): void {
    const trans = this.#trans;
    const [mark, css, label] =
      ok === null
        ? (['·', 'dim', trans.__('info')] as const)
        : ok
          ? (['✓', 'good', trans.__('passed')] as const)
          : (['✗', 'bad', trans.__('failed')] as const);
    this.node.classList.toggle('dim', ok === null);
    this.#mark.text(mark).className(css);
    this.#mark.node.ariaLabel = label;
    this.#found.set(['', found], ['cure', cure && `→ ${cure}`]);
  }
}

interface OfferItem extends OfferButton {
  busy: boolean;
}

class OfferRow {
  #press = () => {};
  #button = button('', () => this.#press());
  readonly node = h('li', '', this.#button);

  update({ label, title, press, busy }: OfferItem): void {
    this.#press = press;
    Object.assign(this.#button, { textContent: label, title, disabled: busy });
  }
}

/** Whether a cure has a button here: virtual GPUs. */
const isOffered = (cure: string) => cure.includes('%gpus --virtual');

/** The doctor's checks, and if there is no GPU, why, and what the host offers instead. */
export class Doctor {
  readonly node: HTMLElement;
  #shared: Shared;
  #title = new Field('h2');
  #advice = new Prose('p', 'advice');
  #offer: HTMLElement;
  #buttons = new Rows(h('ul'), (_: OfferItem) => new OfferRow());
  #status = new Field('p');
  #checks: Rows<Check, CheckRow>;
  #count = new Field('summary', 'dim');
  #all: HTMLDetailsElement;

  constructor(shared: Shared) {
    const { trans, actions } = shared;
    this.#shared = shared;
    const why = trans.__('Virtual GPUs are real `cuda:1` tensors and errors, computed by the CPU.');
    this.#status.node.setAttribute('role', 'status');
    this.#offer = h('div', 'offer', h('p', 'dim', ...typed(why)), this.#buttons.node);
    const code = h('pre', '', '%load_ext gpumagic\n%gpus --virtual 2');
    this.#offer.append(this.#status.node, h('p', 'dim', trans.__('or in a cell:')), code);
    this.#checks = new Rows(h('ul', 'checks'), (check) => new CheckRow(check, trans));
    this.#all = h('details', '', this.#count.node, this.#checks.node);
    const nodes = [this.#title.node, this.#advice.node, this.#offer, this.#all];
    this.node = h('section', 'doctor', ...nodes);
    if (actions.doctor)
      this.node.append(button('again', () => actions.doctor?.(), trans.__('Check again')));
  }

  update(snapshot: Snapshot): void {
    const { trans, checks, offer } = this.#shared;
    const none = !snapshot.gpus.length;
    show(this.node, none || checks !== null);
    this.#title.text(none ? trans.__('No GPU is visible here') : trans.__('Checks'));
    this.#advise(none ? snapshot : null);
    show(this.#offer, none);
    const buttons = offer?.buttons.map((one) => ({ ...one, busy: offer.busy })) ?? [];
    this.#buttons.update(buttons, (_, n) => String(n));
    this.#status.textOrHide(offer?.text ?? '');
    show(this.#all, checks !== null);
    // Without a GPU, the advice says what is most important.
    if (checks && !this.#checks.node.firstChild) this.#all.open = !none;
    this.#checks.update(checks ?? [], ({ name }) => name);
    this.#count.text(trans._n('%1 check', '%1 checks', checks?.length ?? 0));
  }

  /** Say why there is no GPU, and what helps: by the first failed check, unless that is offered. */
  #advise(snapshot: Snapshot | null): void {
    const failed = this.#shared.checks?.find(({ ok }) => ok === false);
    const problem = snapshot?.problems.find((one) => !broken(snapshot).includes(one));
    show(this.#advice.node, problem !== undefined);
    const why = { found: problem?.cause ?? '', cure: '' };
    const { found, cure } = failed && !isOffered(failed.cure) ? failed : why;
    this.#advice.set(['', sentence(found)], ['cure', sentence(cure)]);
  }
}

class ProblemRow {
  #text = new Prose('li', 'problem');
  readonly node = this.#text.node;

  update({ cause, cure }: Problem): void {
    this.#text.set(['cause', sentence(cause)], ['', sentence(cure)]);
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

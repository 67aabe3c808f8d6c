/** Show the doctor's checks, and without a GPU the offer of virtual ones. */

import type { Check, Problem } from '../snapshot.js';
import { button, Field, h, Rows, sentence, show, typed } from './dom.js';
import type { Offer, OfferButton, Shared, Translate } from './shared.js';

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
  #t: Translate;

  constructor({ name }: Check, t: Translate) {
    this.#t = t;
    this.#mark.node.setAttribute('role', 'img');
    this.node = h('li', 'check', this.#mark.node, h('b', '', name), this.#found);
  }

  update({ ok, found, cure }: Check): void {
    const t = this.#t;
    const passed = ok ? ['✓', 'good', t('passed')] : ['✗', 'bad', t('failed')];
    const [mark, css, label] = (ok === null ? ['·', 'dim', t('info')] : passed) as [
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

class OfferRow {
  readonly node: HTMLElement;
  #button: HTMLButtonElement;
  #press = () => {};

  constructor() {
    this.#button = button('', () => this.#press());
    this.node = h('li', '', this.#button);
  }

  update({ label, title, press, busy }: OfferButton & { busy: boolean }): void {
    this.#press = press;
    if (this.#button.textContent !== label) this.#button.textContent = label;
    if (this.#button.title !== title) this.#button.title = title;
    this.#button.disabled = busy;
  }
}

/** What a host offers if there is no GPU: buttons, and a line about their progress. */
class OfferView {
  readonly node: HTMLElement;
  #rows = new Rows(h('ul'), (_: OfferButton & { busy: boolean }) => new OfferRow());
  #status = new Field('p');

  constructor(t: Translate) {
    this.#status.node.setAttribute('role', 'status');
    const why = t('Virtual GPUs are real `cuda:1` tensors and errors, computed by the CPU.');
    this.node = h(
      'div',
      'offer',
      h('p', 'dim', ...typed(why)),
      this.#rows.node,
      this.#status.node,
      h('p', 'dim', t('or in a cell:')),
      h('pre', '', '%load_ext gpumagic\n%gpus --virtual 2'),
    );
  }

  update(offer: Offer | null): void {
    const buttons = offer?.buttons ?? [];
    this.#rows.update(
      buttons.map((one) => ({ ...one, busy: offer?.busy ?? false })),
      (_, n) => String(n),
    );
    show(this.#rows.node, buttons.length > 0);
    this.#status.textOrHide(offer?.text ?? '');
  }
}

/** Whether a cure has a button here: virtual GPUs. */
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
    const nodes = [this.#title.node, this.#advice, this.#offer.node, this.#checks.node];
    if (actions.doctor) nodes.push(button('again', () => actions.doctor?.(), t('Check again')));
    this.node = h('section', 'doctor', ...nodes);
    show(this.node, false);
  }

  /** Show the checks if known; `why` there is no GPU, null if there are GPUs. */
  update(why: Problem[] | null): void {
    const { t, checks, offer } = this.#shared;
    show(this.node, why !== null || checks !== null);
    this.#title.text(why ? t('No GPU is visible here') : t('Checks'));
    show(this.#offer.node, why !== null);
    if (why) this.#offer.update(offer);
    const first = checks?.find(({ ok }) => ok === false);
    // The offer has buttons for its cures. The cure of the first failed check is the advice.
    if (!why?.length || (first && isOffered(first.cure))) this.#advise('', '');
    else if (first) this.#advise(first.found, first.cure);
    else this.#advise(checks ? '' : (why[0]?.cause ?? ''), '');
    const shown = (checks ?? []).map((check) =>
      why && (check === first || isOffered(check.cure)) ? { ...check, cure: '' } : check,
    );
    this.#checks.update(shown, ({ name }) => name);
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

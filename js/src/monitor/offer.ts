/** What a host offers where there is no GPU: buttons, and a line on what came of them. */

import { Field, h, Rows, show, typed } from './dom.js';
import type { Translate } from './shared.js';

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

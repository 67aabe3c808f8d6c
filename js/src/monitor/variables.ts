/** List the notebook's variables on a GPU; the kernel is asked only while they are visible. */

import { SLOW_S, type Variable } from '../snapshot.js';
import { ShareBar } from './bars.js';
import { button, CHEVRON, expand, Field, h, icon, Rows, show } from './dom.js';
import type { View } from './owners.js';
import type { Shared } from './shared.js';
import { size } from './units.js';

let count = 0;

interface Item {
  row: Variable;
  /** The bytes of all variables on the GPU. */
  total: number;
}

class VariableRow {
  #name = new Field('span', 'title');
  #size = new Field('span', 'size');
  #note = new Field('span', 'dim note');
  #bar = new ShareBar('own');
  readonly node: HTMLElement;

  constructor() {
    const fields = [this.#name, this.#size, this.#note, this.#bar].map(({ node }) => node);
    this.node = h('li', 'variable', ...fields);
  }

  update({ row, total }: Item): void {
    const note = [row.made, row.kind].filter(Boolean).join(' · ');
    this.#name.text(row.name).title([row.name, ...row.aliases].join(', '));
    this.#size.text(size(row.nbytes));
    this.#bar.update((100 * row.nbytes) / (total || 1));
    this.#note.textOrHide(note).title(note);
  }
}

/** How many variables a closed table names. */
const NAMED = 2;

export class VariablesTable {
  readonly node: HTMLElement;
  #shared: Shared;
  #uuid: string;
  #key: string;
  #title = new Field('span', 'heads');
  #button: HTMLButtonElement;
  #refresh: HTMLButtonElement;
  #list = h('div');
  #status = new Field('span');
  #rows = new Rows(h('ul', 'rows'), (_: Item) => new VariableRow());
  #more = new Field('div', 'dim note');

  constructor(uuid: string, shared: Shared) {
    const { trans, opened, actions } = shared;
    this.#shared = shared;
    this.#uuid = uuid;
    this.#key = `variables ${uuid}`;
    this.#list.id = `variables-${count++}`;
    const toggle = () => opened.set(this.#key, !opened.get(this.#key));
    this.#button = button('open', toggle, icon(CHEVRON), this.#title.node);
    this.#button.setAttribute('aria-controls', this.#list.id);
    this.#refresh = button('more', () => actions.variables?.(true), trans.__('Refresh'));
    const status = h('div', 'dim note', this.#status.node, ' ', this.#refresh);
    this.#list.append(this.#rows.node, this.#more.node, status);
    this.node = h('div', 'variables', this.#button, this.#list);
  }

  update(view: View): void {
    const { variables, trans, opened, past, here, actions } = this.#shared;
    const isOpen = opened.get(this.#key) ?? false;
    show(this.node, view.parts.own > 0);
    if (view.parts.own > 0) actions.variables?.(false);
    expand(this.#button, isOpen);
    show(this.#list, isOpen);
    const known = typeof variables === 'object' ? variables : null;
    const found = known?.gpus[this.#uuid];
    const rows = found?.rows ?? [];
    const largest = rows.slice(0, NAMED).map(({ name, nbytes }) => `${name} ${size(nbytes)}`);
    const number = rows.length + (found?.more ?? 0);
    const title = number ? trans.__('Variables (%1)', number) : trans.__('Variables');
    this.#title.text(isOpen || !number ? title : `${title}: ${largest.join(' · ')}`);
    if (!isOpen) return;
    const total = found?.allocated ?? 0;
    // A name can have two rows: for torch and for another library.
    this.#rows.update(
      rows.map((row) => ({ row, total })),
      (_, n) => String(n),
    );
    this.#more.textOrHide(found?.more ? trans.__('%1 more, %2', found.more, size(found.left)) : '');
    const running = !!past.running(here);
    show(this.#refresh, (known?.seconds ?? 0) >= SLOW_S && !running);
    this.#status.text(this.#describe(!!found, running));
  }

  /** Return after which cell the rows were taken, or why there are none. */
  #describe(found: boolean, running: boolean): string {
    const { variables, trans } = this.#shared;
    if (typeof variables === 'string') return variables;
    if (!variables)
      return running ? trans.__('Waiting for the cell to finish…') : trans.__('Asking the kernel…');
    const parts = [
      variables.cell > 0 ? trans.__('as of In [%1]', variables.cell) : trans.__('as of now'),
    ];
    if (!found) parts.unshift(trans.__('No torch memory on this GPU'));
    if (running) parts.push(trans.__('a cell is running'));
    return parts.join(' · ');
  }
}

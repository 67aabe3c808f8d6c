/** List the notebook's variables on a GPU; the kernel is asked only while they are visible. */

import { SLOW_S, type Variable } from '../snapshot.js';
import { ShareBar } from './bars.js';
import { button, CHEVRON, expand, Field, h, icon, Rows, show } from './dom.js';
import type { View } from './owners.js';
import type { Shared } from './shared.js';
import { size } from './units.js';

let count = 0;

class VariableRow {
  #name = new Field('span', 'title');
  #size = new Field('span', 'size');
  #note = new Field('span', 'dim note');
  #bar = new ShareBar('own');
  readonly node = h(
    'li',
    'holding',
    this.#name.node,
    this.#size.node,
    this.#note.node,
    this.#bar.node,
  );

  update({ row, total }: { row: Variable; total: number }): void {
    const note = [row.made, row.kind].filter(Boolean).join(' · ');
    this.#name.text(row.name).title([row.name, ...row.aliases].join(', '));
    this.#size.text(size(row.nbytes));
    this.#bar.update((100 * row.nbytes) / (total || 1));
    this.#note.textOrHide(note).title(note);
  }
}

/** The largest ones, which a closed table names. */
const NAMED = 2;

export class Variables {
  readonly node: HTMLElement;
  #shared: Shared;
  #uuid: string;
  #key: string;
  #title = new Field('span', 'heads');
  #button: HTMLButtonElement;
  #refresh: HTMLButtonElement;
  #list = h('div');
  #status = new Field('span');
  #rows = new Rows(h('ul', 'holdings'), (_: { row: Variable; total: number }) => new VariableRow());
  #more = new Field('div', 'dim note');

  constructor(uuid: string, shared: Shared) {
    const { trans, open, toggled, redraw } = shared;
    this.#shared = shared;
    this.#uuid = uuid;
    this.#key = `variables ${uuid}`;
    this.#list.id = `variables-${count++}`;
    const toggle = () => {
      open.set(this.#key, !open.get(this.#key));
      if (open.get(this.#key) && this.#slow) shared.actions.variables?.(true);
      toggled();
      redraw();
    };
    this.#button = button('open', toggle, icon(CHEVRON), this.#title.node);
    this.#button.setAttribute('aria-controls', this.#list.id);
    this.#refresh = button('more', () => shared.actions.variables?.(true), trans.__('Refresh'));
    const status = h('div', 'dim note', this.#status.node, ' ', this.#refresh);
    this.#list.append(this.#rows.node, this.#more.node, status);
    this.node = h('div', 'variables', this.#button, this.#list);
  }

  update(view: View): void {
    const { variables, trans, open, runs, here } = this.#shared;
    const isOpen = open.get(this.#key) ?? false;
    this.#want(view.parts.own > 0);
    show(this.node, view.parts.own > 0);
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
    const running = !!runs.running(here);
    show(this.#refresh, this.#slow && !running);
    if (typeof variables === 'string') this.#status.text(variables);
    else if (!known)
      this.#status.text(
        running ? trans.__('Waiting for the cell to finish…') : trans.__('Asking the kernel…'),
      );
    else
      this.#status.text(
        [
          found ? '' : trans.__('No torch memory on this GPU'),
          known.cell > 0 ? trans.__('as of In [%1]', known.cell) : trans.__('as of now'),
          running ? trans.__('a cell is running') : '',
        ]
          .filter(Boolean)
          .join(' · '),
      );
  }

  dispose(): void {
    this.#want(false);
  }

  get #slow(): boolean {
    const { variables } = this.#shared;
    return typeof variables === 'object' && (variables?.seconds ?? 0) >= SLOW_S;
  }

  /** Request the variables when they become visible, and stop with the last GPU. */
  #want(on: boolean): void {
    const { opened, actions } = this.#shared;
    if (on === opened.has(this.#uuid)) return;
    if (on) opened.add(this.#uuid);
    else opened.delete(this.#uuid);
    if (on || !opened.size) actions.variables?.(on);
  }
}

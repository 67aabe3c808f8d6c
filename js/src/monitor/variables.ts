/** List the notebook's variables on a GPU; the kernel is asked only while the table is open. */

import { SLOW_S, type Variable } from '../snapshot.js';
import { ShareBar } from './bars.js';
import { button, CHEVRON, expand, Field, h, icon, Rows, show } from './dom.js';
import { labelOf } from './names.js';
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

/** Request the variables when a table opens or is refreshed, and stop with the last one. */
function request({ opened, actions, redraw }: Shared, uuid: string, open: boolean): void {
  const last = !open && opened.delete(uuid) && !opened.size;
  if (open) opened.add(uuid);
  if (open || last) actions.variables?.(open);
  redraw();
}

export class Variables {
  readonly node: HTMLElement;
  #shared: Shared;
  #uuid: string;
  #key: string;
  #title = new Field();
  #button: HTMLButtonElement;
  #refresh: HTMLButtonElement;
  #list = h('div');
  #status = new Field('span');
  #rows = new Rows(h('ul', 'holdings'), (_: { row: Variable; total: number }) => new VariableRow());
  #more = new Field('div', 'dim note');
  #open = false;

  constructor(uuid: string, shared: Shared) {
    this.#shared = shared;
    this.#uuid = uuid;
    this.#key = `variables ${uuid}`;
    this.#list.id = `variables-${count++}`;
    this.#button = button('open', () => this.#toggle(), icon(CHEVRON), this.#title.node);
    this.#button.setAttribute('aria-controls', this.#list.id);
    this.#refresh = button('more', () => request(shared, uuid, true), shared.t('Refresh'));
    const status = h('div', 'dim note', this.#status.node, ' ', this.#refresh);
    this.#list.append(this.#rows.node, this.#more.node, status);
    this.node = h('div', 'variables', this.#button, this.#list);
  }

  update(view: View): void {
    const { variables, t, open, runs, here } = this.#shared;
    const own = view.parts.own > 0;
    const title = t('Variables on %1', labelOf(view, here));
    this.#title.text(title);
    if (this.#rows.node.ariaLabel !== title) this.#rows.node.ariaLabel = title;
    show(this.node, own || this.#open);
    if (own && !this.#open && open.get(this.#key)) this.#toggle();
    expand(this.#button, this.#open);
    show(this.#list, this.#open);
    if (!this.#open) return;
    const known = typeof variables === 'object' ? variables : null;
    const found = known?.gpus[this.#uuid];
    const total = found?.allocated ?? 0;
    // A name can have two rows: for torch and for another library.
    this.#rows.update(
      (found?.rows ?? []).map((row) => ({ row, total })),
      (_, n) => String(n),
    );
    this.#more.textOrHide(found?.more ? t('%1 more, %2', found.more, size(found.left)) : '');
    const running = !!runs.running(here);
    show(this.#refresh, !!known && known.seconds >= SLOW_S && !running);
    if (typeof variables === 'string') this.#status.text(variables);
    else if (!known)
      this.#status.text(running ? t('Waiting for the cell to finish…') : t('Asking the kernel…'));
    else
      this.#status.text(
        [
          found ? '' : t('No torch memory on this GPU'),
          known.cell > 0 ? t('as of In [%1]', known.cell) : t('as of now'),
          running ? t('a cell is running') : '',
        ]
          .filter(Boolean)
          .join(' · '),
      );
  }

  dispose(): void {
    if (this.#open) request(this.#shared, this.#uuid, false);
    this.#open = false;
  }

  #toggle(): void {
    this.#open = !this.#open;
    this.#shared.open.set(this.#key, this.#open);
    this.#shared.toggled();
    request(this.#shared, this.#uuid, this.#open);
  }
}

/** List the processes that hold memory, with the actions on them. */

import type { ProcessSample } from '../snapshot.js';
import type { ProcessButtons } from './buttons.js';
import { Field, h, Rows, show } from './dom.js';
import { file, gpuCount, holderName } from './names.js';
import { type Group, groups, outlives } from './owners.js';
import type { Shared } from './shared.js';
import { age, size } from './units.js';

/** Rows of a closed list. */
const FEW = 4;
/** Shorter cells are not mentioned: the text would flicker. */
const LONG_S = 2;

type Item = Group | { key: string; memory: number };
/** Return the utilization of the GPU that a group uses most, in percent; 0 if unknown. */
function utilization(all: ProcessSample[]): number {
  const busy = new Map<string, number>();
  for (const { uuid, utilization } of all)
    busy.set(uuid, (busy.get(uuid) ?? 0) + (utilization ?? 0));
  return Math.round(Math.min(100, Math.max(0, ...busy.values())));
}

class ProcessRow {
  readonly node = h('li', 'process');
  #shared: Shared;
  #dot = new Field('i', 'dot');
  #name = new Field('span', 'who');
  #note = new Field('span', 'dim note');
  #busy = new Field('span', 'limit dim note');
  #memory = new Field('span', 'size');
  #buttons: ProcessButtons | null;

  constructor(shared: Shared) {
    this.#shared = shared;
    this.#buttons = shared.extras?.buttons(shared) ?? null;
    const text = h('span', 'text', this.#name.node, this.#note.node);
    this.node.append(this.#dot.node, text, this.#busy.node, this.#memory.node);
    if (this.#buttons) this.node.append(this.#buttons.node);
  }

  update(item: Item): void {
    const { trans } = this.#shared;
    const group = 'main' in item ? item : null;
    const main = group?.main ?? null;
    const orphan = main?.orphan ?? false;
    const name = main ? holderName(main, trans) : trans.__('system');
    const busy = group ? utilization(group.all) : 0;
    const notes = group ? this.#notes(group).join(' · ') : '';
    this.#memory.text(size(item.memory));
    this.#dot.className(`dot ${group?.owner ?? 'system'}`);
    this.#name
      .className(group?.owner === 'own' ? 'who own' : 'who')
      .text(name)
      .title(
        group
          ? this.#details(group, busy)
          : trans.__('Held by no visible process: by the driver, or outside this container.'),
      );
    this.#busy.textOrHide(busy ? trans.__('busy %1 %', busy) : '');
    this.#note
      .textOrHide(notes)
      .title(notes)
      .className(`note ${orphan ? 'warn' : 'dim'}`);
    this.#buttons?.update(main, name);
    this.node.classList.toggle('trouble', orphan);
  }

  #notes({ main, all, key, owner }: Group): string[] {
    const { trans, now, runs } = this.#shared;
    const notes = [];
    const run = main.orphan ? undefined : runs.running(main.kernel);
    const gpus = new Set(all.map(({ uuid }) => uuid)).size;
    if (gpus > 1) notes.push(gpuCount(trans, gpus));
    if (main.orphan) notes.push(trans.__('still running'));
    else if (outlives(main))
      notes.push(trans.__('started by %1, still running', file(main.notebook ?? '')));
    else if (run && now - run.start >= LONG_S)
      notes.push(trans.__('In [%1] · %2', run.count ?? ' ', age(now - run.start)));
    else if (main.idle_since !== null && owner !== 'own' && now - main.idle_since >= 60)
      notes.push(trans.__('idle %1', age(now - main.idle_since)));
    const workers = new Set(all.filter((process) => process.child).map(({ pid }) => pid)).size;
    if (workers && !main.orphan) notes.push(trans._n('+%1 worker', '+%1 workers', workers));
    if (main.server) notes.push(trans.__('on another server'));
    if (key.startsWith('pid') && main.name) notes.push(trans.__('PID %1', main.pid));
    return notes;
  }

  /** All that is known, for the tooltip. */
  #details({ main, all, owner }: Group, busy: number): string {
    const { trans, now } = this.#shared;
    const each = all.map(
      ({ pid, memory }) => trans.__('PID %1', pid) + (all.length > 1 ? ` ${size(memory)}` : ''),
    );
    return [
      main.notebook ?? main.name,
      owner === 'own' && trans.__('this notebook'),
      main.orphan && trans.__('its kernel has exited'),
      main.user,
      main.kind,
      main.ordinal !== null && `cuda:${main.ordinal}`,
      main.host_memory && trans.__('%1 of RAM', size(main.host_memory)),
      busy && trans.__('busy %1 %', busy),
      main.server,
      main.started !== null && trans.__('running %1', age(now - main.started)),
      ...each.slice(0, 12),
    ]
      .filter(Boolean)
      .join(' · ');
  }
}

export class Processes {
  readonly node = h('div');
  #rows: Rows<Item, ProcessRow>;
  #more = new Field('button', 'dim more');
  #expanded = false;
  #shared: Shared;
  #last: [ProcessSample[], number, boolean] = [[], 0, true];

  constructor(shared: Shared, label: string) {
    this.#shared = shared;
    this.#rows = new Rows(h('ul', 'processes'), () => new ProcessRow(shared));
    this.#rows.node.ariaLabel = label;
    this.#more.node.addEventListener('click', () => {
      this.#expanded = !this.#expanded;
      this.update(...this.#last);
    });
    this.node.append(this.#rows.node, this.#more.node);
  }

  /** Show `all` rows, or the first few and a button for the rest. */
  update(processes: ProcessSample[], system: number, all: boolean): void {
    const { trans, here } = this.#shared;
    this.#last = [processes, system, all];
    const items: Item[] = groups(processes, here);
    if (system) items.push({ key: 'system', memory: system });
    const few = !all && items.length > FEW + 1;
    const shown = few && !this.#expanded ? items.slice(0, FEW) : items;
    this.#rows.update(shown, ({ key }) => key, true);
    const rest = items.length - shown.length;
    this.#more.textOrHide(few ? (rest ? trans.__('and %1 more', rest) : trans.__('fewer')) : '');
    show(this.node, items.length > 0);
  }
}

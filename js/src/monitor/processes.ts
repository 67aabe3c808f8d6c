/** List the processes that hold memory, with the actions on them. */

import type { ProcessSample } from '../snapshot.js';
import type { ProcessButtons } from './buttons.js';
import { Field, h, Rows, show } from './dom.js';
import { file } from './names.js';
import { type Group, groups, outlives, stranger } from './owners.js';
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
    const { t } = this.#shared;
    const group = 'main' in item ? item : null;
    const main = group?.main ?? null;
    const orphan = main?.orphan ?? false;
    const name = main ? this.#nameOf(main) : t('not visible here');
    const busy = group ? utilization(group.all) : 0;
    const notes = group ? this.#notes(group).join(' · ') : '';
    this.#memory.text(size(item.memory));
    this.#dot.className(`dot ${group?.owner ?? 'unattributed'}`);
    this.#name
      .className(group?.owner === 'own' ? 'who own' : 'who')
      .text(name)
      .title(
        group
          ? this.#details(group, busy)
          : t('Held by a process outside this container, or by the driver.'),
      );
    this.#busy.textOrHide(busy ? t('busy %1 %', busy) : '');
    this.#note
      .textOrHide(notes)
      .title(notes)
      .className(`note ${orphan ? 'warn' : 'dim'}`);
    this.#buttons?.update(main, name);
    this.node.classList.toggle('trouble', orphan);
  }

  /** "train.ipynb", "alice", "python3 (you)", "exited (PID 123)". */
  #nameOf(main: ProcessSample): string {
    const { t } = this.#shared;
    if (main.notebook && !outlives(main)) return file(main.notebook);
    if (main.mine) return t('this kernel');
    if (stranger(main)) return main.user as string;
    return main.name ? t('%1 (you)', main.name) : t('exited (PID %1)', main.pid);
  }

  #notes({ main, all, key, owner }: Group): string[] {
    const { t, now, runs } = this.#shared;
    const notes = [];
    const run = main.orphan ? undefined : runs.running(main.kernel);
    const gpus = new Set(all.map(({ uuid }) => uuid)).size;
    if (gpus > 1) notes.push(t('%1 GPUs', gpus));
    if (main.orphan) notes.push(t('still running'));
    else if (outlives(main))
      notes.push(t('started by %1, still running', file(main.notebook ?? '')));
    else if (run && now - run.start >= LONG_S)
      notes.push(t('In [%1] · %2', run.count ?? ' ', age(now - run.start)));
    else if (main.idle_since !== null && owner !== 'own' && now - main.idle_since >= 60)
      notes.push(t('idle %1', age(now - main.idle_since)));
    const workers = new Set(all.filter((process) => process.child).map(({ pid }) => pid)).size;
    if (workers && !main.orphan)
      notes.push(workers > 1 ? t('+%1 workers', workers) : t('+1 worker'));
    if (main.server) notes.push(t('on another server'));
    if (key.startsWith('pid') && main.name) notes.push(t('PID %1', main.pid));
    return notes;
  }

  /** All that is known, for the tooltip. */
  #details({ main, all, owner }: Group, busy: number): string {
    const { t, now } = this.#shared;
    const each = all.map(
      ({ pid, memory }) => t('PID %1', pid) + (all.length > 1 ? ` ${size(memory)}` : ''),
    );
    return [
      main.notebook ?? main.name,
      owner === 'own' && t('this notebook'),
      main.orphan && t('its kernel has exited'),
      main.user,
      main.kind,
      main.ordinal !== null && `cuda:${main.ordinal}`,
      main.host_memory && t('%1 of RAM', size(main.host_memory)),
      busy && t('busy %1 %', busy),
      main.server,
      main.started !== null && t('running %1', age(now - main.started)),
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
  update(processes: ProcessSample[], unattributed: number, all: boolean): void {
    const { t, here } = this.#shared;
    this.#last = [processes, unattributed, all];
    const items: Item[] = groups(processes, here);
    if (unattributed) items.push({ key: 'unattributed', memory: unattributed });
    const few = !all && items.length > FEW + 1;
    const shown = few && !this.#expanded ? items.slice(0, FEW) : items;
    this.#rows.update(shown, ({ key }) => key);
    const rest = items.length - shown.length;
    this.#more.textOrHide(few ? (rest ? t('and %1 more', rest) : t('fewer')) : '');
    show(this.node, items.length > 0);
  }
}

/** The rows of who holds memory, with what can be done about it. */

import type { ProcessSample } from '../snapshot.js';
import { Field, h, icon, Rows, show } from './dom.js';
import { file } from './names.js';
import { type Group, groups, outlives, stranger } from './owners.js';
import type { Shared } from './shared.js';
import { age, size } from './units.js';

/** Rows of a GPU that is not open. */
const FEW = 4;
/** A cell that runs for less is not worth a word that flickers. */
const LONG_S = 2;

type Item = Group | { key: string; memory: number };
type Act = 'goTo' | 'interrupt' | 'shutDown' | 'terminate';

const ICONS: Record<Act, string> = {
  goTo: 'M6 3.5h6.500v6.500M12 4L4 12',
  interrupt: 'M4.500 4.500h7v7h-7z',
  shutDown: 'M8 2.500v5M5 4.500a4.800 4.800 0 1 0 6 0',
  terminate: 'M4.500 4.500l7 7M11.500 4.500l-7 7',
};

/** What makes sense for whom: any notebook is opened, a kernel of this server steered, an orphan ended. */
function sensible(act: Act, process: ProcessSample): boolean {
  if (act === 'terminate') return process.orphan && !process.elsewhere;
  if (process.orphan || !process.kernel) return false;
  return act === 'goTo' ? process.notebook !== null : !process.server;
}

/** Percent of the time of the GPU that a group keeps busiest; 0 where none is known. */
function busiest(all: ProcessSample[]): number {
  const busy = new Map<string, number>();
  for (const { uuid, utilization } of all)
    busy.set(uuid, (busy.get(uuid) ?? 0) + (utilization ?? 0));
  return Math.min(100, Math.max(0, ...busy.values()));
}

class ProcessRow {
  readonly node = h('li', 'process');
  #shared: Shared;
  #dot = new Field('i', 'dot');
  #name = new Field('span', 'who');
  #note = new Field('span', 'dim note');
  // Of a narrow panel it would take another line.
  #busy = new Field('span', 'limit dim note');
  #memory = new Field('span', 'size');
  #buttons: [Act, HTMLButtonElement][] = [];
  #acts = h('span', 'acts');
  #main: ProcessSample | null = null;

  constructor(shared: Shared) {
    this.#shared = shared;
    this.#dot.node.setAttribute('aria-hidden', 'true');
    const { t, actions } = shared;
    const titles: Record<Act, string> = {
      goTo: t('Go to the notebook'),
      interrupt: t('Interrupt the kernel'),
      shutDown: t('Shut down the kernel'),
      terminate: t('End what was left behind'),
    };
    for (const act of Object.keys(ICONS) as Act[]) {
      if (!actions[act]) continue;
      const button = h('button', '', icon(ICONS[act]));
      button.type = 'button';
      button.title = titles[act];
      button.addEventListener('click', () => this.#main && actions[act]?.(this.#main));
      this.#buttons.push([act, button]);
      this.#acts.append(button);
    }
    const text = h('span', 'text', this.#name.node, this.#note.node);
    this.node.append(this.#dot.node, text, this.#busy.node, this.#memory.node, this.#acts);
  }

  update(item: Item): void {
    const { t } = this.#shared;
    this.#memory.say(size(item.memory));
    if (!('main' in item)) {
      this.#dot.look('dot unseen');
      this.#name.look('who').say(t('unaccounted')).hint(t('no process that can be seen holds it'));
      this.#note.offer('');
      this.#busy.offer('');
      show(this.#acts, false);
      return;
    }
    const { main, owner } = item;
    this.#main = main;
    const name = this.#named(main);
    this.#dot.look(`dot ${owner}`);
    this.#name
      .look(owner === 'mine' ? 'who mine' : 'who')
      .say(name)
      .hint(this.#whole(item));
    const busy = busiest(item.all);
    this.#busy.offer(busy ? t('busy %1 %', Math.round(busy)) : '');
    const notes = this.#notes(item).join(' · ');
    this.#note
      .offer(notes)
      .hint(notes)
      .look(`note ${main.orphan ? 'warn' : 'dim'}`);
    let some = false;
    for (const [act, button] of this.#buttons) {
      const sense = sensible(act, main);
      some ||= sense;
      show(button, sense);
      const label = `${button.title}: ${name}${main.orphan ? ` (pid ${main.pid})` : ''}`;
      if (sense && button.ariaLabel !== label) button.ariaLabel = label;
    }
    show(this.#acts, some);
    this.node.classList.toggle('trouble', main.orphan);
  }

  /** A notebook, whose process it is: "alice", "you · python3", "gone (pid 123)". */
  #named(main: ProcessSample): string {
    const { t } = this.#shared;
    if (main.notebook && !outlives(main)) return file(main.notebook);
    if (main.mine) return t('this kernel');
    if (stranger(main)) return main.user as string;
    return main.name ? t('you · %1', main.name) : t('gone (pid %1)', main.pid);
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
    else if (main.idle_since !== null && owner !== 'mine' && now - main.idle_since >= 60)
      notes.push(t('idle %1', age(now - main.idle_since)));
    const workers = new Set(all.filter((process) => process.child).map(({ pid }) => pid)).size;
    if (workers && !main.orphan) {
      notes.push(workers > 1 ? t('+%1 workers', workers) : t('+1 worker'));
    }
    if (main.server) notes.push(t('on another server'));
    if (key.startsWith('pid') && main.name) notes.push(t('pid %1', main.pid));
    return notes;
  }

  /** All that is known, for who asks. */
  #whole({ main, all, owner }: Group): string {
    const { t, now } = this.#shared;
    const busy = busiest(all);
    const started = main.started === null ? '' : t('running %1', age(now - main.started));
    const each = all.map(
      ({ pid, memory }) => t('pid %1', pid) + (all.length > 1 ? ` ${size(memory)}` : ''),
    );
    return [
      main.notebook ?? main.name ?? '',
      owner === 'mine' ? t('this notebook') : '',
      main.orphan ? t('its kernel is gone') : '',
      main.user ?? '',
      main.kind ?? '',
      main.ordinal === null ? '' : `cuda:${main.ordinal}`,
      main.host_memory ? t('%1 of RAM', size(main.host_memory)) : '',
      busy ? t('busy %1 %', Math.round(busy)) : '',
      main.server ?? '',
      started,
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
  #whole = false;
  #shared: Shared;
  #said: [ProcessSample[], number, boolean] = [[], 0, true];

  constructor(shared: Shared, label: string) {
    this.#shared = shared;
    this.#rows = new Rows(h('ul', 'processes'), () => new ProcessRow(shared));
    this.#rows.node.setAttribute('aria-label', label);
    this.#more.node.addEventListener('click', () => {
      this.#whole = !this.#whole;
      this.update(...this.#said);
    });
    this.node.append(this.#rows.node, this.#more.node);
    this.update([], 0, true);
  }

  /** `all`, or the first few and a button for the rest. */
  update(processes: ProcessSample[], unseen: number, all: boolean): void {
    const { t, here } = this.#shared;
    this.#said = [processes, unseen, all];
    const items: Item[] = groups(processes, here);
    if (unseen) items.push({ key: 'unseen', memory: unseen });
    const few = !all && items.length > FEW + 1;
    const shown = few && !this.#whole ? items.slice(0, FEW) : items;
    this.#rows.update(shown.map((item) => [item.key, item] as const));
    const rest = items.length - shown.length;
    this.#more.offer(few ? (rest ? t('and %1 more', rest) : t('fewer')) : '');
    show(this.node, items.length > 0);
  }
}

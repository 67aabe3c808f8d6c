/** List notebooks and whoever else holds memory: their CPU, RAM, GPU memory, and running cell. */

import type { Host, KernelSample, ProcessSample, Snapshot } from '../snapshot.js';
import type { ProcessButtons } from './buttons.js';
import { Field, h, Rows, show } from './dom.js';
import { file, gpuCount, holderName, labelOf } from './names.js';
import { type Group, groups, outlives, type View } from './owners.js';
import type { Shared, Translate } from './shared.js';
import { age, fastest, isFull, ram, reading, size } from './units.js';

/** Rows of a closed list. */
const FEW = 8;
/** Shorter cells are not mentioned: the text would flicker. */
const LONG_S = 2;
/** More devices are a number. */
const NAMED = 2;

interface Item {
  key: string;
  memory: number | null;
  group?: Group;
  load?: KernelSample | undefined;
  /** How fast it fills the RAM; empty if it does not. */
  filling?: string;
}

/** A kernel as a process without a GPU; what is unknown is undefined. */
const process = (kernel: KernelSample): ProcessSample =>
  ({ uuid: '', memory: null, ...kernel }) as unknown as ProcessSample;

/** "+1.4 GiB/s · full in ~2 s". */
function rate({ growth }: KernelSample, host: Host, trans: Translate): string {
  const [used, total] = ram(host);
  const left = age(((total ?? 0) - (used ?? 0)) / (growth || 1));
  return trans.__('+%1/s · full in ~%2', size(growth), left);
}

class NotebookRow {
  readonly node = h('li', 'process');
  #shared: Shared;
  #labels: ReadonlyMap<string, string>;
  #dot = new Field('i', 'dot');
  #name = new Field('span', 'who');
  #cpu = new Field('span', 'size cost');
  #ram = new Field('span', 'size cost');
  #memory = new Field('span', 'size');
  #note = new Field('span', 'dim note');
  #buttons: ProcessButtons | null;

  constructor(shared: Shared, labels: ReadonlyMap<string, string>) {
    [this.#shared, this.#labels] = [shared, labels];
    this.#buttons = shared.extras?.buttons(shared) ?? null;
    const fields = [this.#dot, this.#name, this.#cpu, this.#ram, this.#memory, this.#note];
    this.node.append(...fields.map(({ node }) => node));
    if (this.#buttons) this.node.append(this.#buttons.node);
  }

  update({ group, load, memory, filling }: Item): void {
    const { trans } = this.#shared;
    const main = group?.main ?? null;
    const orphan = main?.orphan ?? false;
    const name = main ? holderName(main, trans) : trans.__('system');
    const notes = group ? this.#notes(group) : [];
    const text = (filling ? [filling, ...notes] : notes).join(' · ');
    this.#cpu.text(load ? reading(load.cpu, '%') : '');
    this.#ram.text(load ? size(load.host_memory) : '');
    this.#memory.text(memory === null && load ? '' : size(memory));
    this.#dot.className(`dot ${group?.owner ?? 'system'}`);
    this.#name
      .className(`who ${group?.owner}`)
      .text(name)
      .title(
        group
          ? this.#details(group)
          : trans.__('Held by a process outside this container, or by the driver'),
      );
    this.#note
      .textOrHide(text)
      .title(text)
      .className(`note ${orphan || filling ? 'warn' : 'dim'}`);
    this.#buttons?.update(main, name);
    this.node.classList.toggle('trouble', orphan);
  }

  #notes({ main, all, key }: Group): string[] {
    const { trans, now, past } = this.#shared;
    const uuids = [...new Set(all.map(({ uuid }) => uuid))].filter(Boolean);
    const notes =
      uuids.length > NAMED
        ? [gpuCount(trans, uuids.length)]
        : uuids.flatMap((uuid) => this.#labels.get(uuid) ?? []);
    const run = main.orphan ? undefined : past.running(main.kernel);
    if (main.orphan) notes.push(trans.__('still running'));
    else if (outlives(main))
      notes.push(trans.__('started by %1, still running', file(main.notebook ?? '')));
    else if (run && now - run.start >= LONG_S)
      notes.push(trans.__('In [%1] · %2', run.count ?? ' ', age(now - run.start)));
    else if (main.idle_since !== null) {
      const idle = now - main.idle_since;
      notes.push(idle >= 60 ? trans.__('idle %1', age(idle)) : trans.__('idle'));
    }
    const workers = new Set(all.filter((process) => process.child).map(({ pid }) => pid)).size;
    if (workers && !main.orphan) notes.push(trans._n('+%1 worker', '+%1 workers', workers));
    if (main.server) notes.push(trans.__('on another server'));
    if (key.startsWith('pid') && main.name) notes.push(trans.__('PID %1', main.pid));
    const busy = Math.round(Math.max(...all.map(({ utilization }) => utilization ?? 0)));
    return busy ? [...notes, trans.__('busy %1 %', busy)] : notes;
  }

  /** The rest, for the tooltip. */
  #details({ main, all }: Group): string {
    const { trans } = this.#shared;
    const { notebook, name, user } = main;
    const pids = all.map(({ pid, uuid, memory }) =>
      [trans.__('PID %1', pid), this.#labels.get(uuid), uuid && size(memory)].join(' '),
    );
    return [notebook ?? name, user, ...pids].filter(Boolean).join(' · ');
  }
}

export class Notebooks {
  readonly node = h('section', 'notebooks');
  #rows: Rows<Item, NotebookRow>;
  #labels = new Map<string, string>();
  #more = new Field('button', 'dim more');
  #expanded = false;
  #shared: Shared;

  constructor(shared: Shared) {
    const { trans } = shared;
    this.#shared = shared;
    this.#rows = new Rows(h('ul'), () => new NotebookRow(shared, this.#labels));
    this.#rows.node.ariaLabel = trans.__('Notebooks');
    this.#more.node.addEventListener('click', () => {
      this.#expanded = true;
      shared.redraw();
    });
    const head = h('div', 'process titles', h('h2', '', trans.__('Notebooks')));
    for (const name of ['CPU', 'RAM', 'GPU']) head.append(h('span', 'size cost', name));
    this.node.append(head, this.#rows.node, this.#more.node);
  }

  /** Show who holds memory on some GPUs, and the server's kernels. */
  update(snapshot: Snapshot, views: readonly View[]): void {
    const { trans, here } = this.#shared;
    const all = views.flatMap((view) => [...view.migs, view]);
    this.#labels.clear();
    for (const view of all) this.#labels.set(view.gpu.uuid, labelOf(view, here));
    const { host, kernels } = snapshot;
    const loads = new Map(kernels.map((load) => [load.kernel, load]));
    const growing = isFull(host) ? fastest(kernels) : undefined;
    const processes = [...all.flatMap(({ processes }) => processes), ...kernels.map(process)];
    const items: Item[] = groups(processes, here).map((group) => {
      const load = group.main.orphan ? undefined : loads.get(group.main.kernel ?? '');
      const { key, memory } = group;
      const filling = growing && growing === load ? rate(growing, host, trans) : '';
      return { key, memory, group, load, filling };
    });
    const system = views.reduce((sum, view) => sum + view.system, 0);
    if (system) items.push({ key: 'system', memory: system });
    const shown = this.#expanded || items.length <= FEW + 1 ? items : items.slice(0, FEW);
    const rest = items.length - shown.length;
    this.node.classList.toggle('bare', !kernels.length);
    this.#rows.update(shown, ({ key }) => key, true);
    this.#more.textOrHide(rest ? trans.__('and %1 more', rest) : '');
    show(this.node, items.length > 0);
  }
}

/** Show the GPUs of each host; the name of a host stands above its GPUs if there are several. */

import type { OtherHost, Snapshot } from '../snapshot.js';
import { Legend } from './bars.js';
import type { Sight } from './browser.js';
import { Problems } from './doctor.js';
import { Field, h, parts, Rows, show } from './dom.js';
import { Gpus } from './gpus.js';
import { broken } from './names.js';
import { type View, whole } from './owners.js';
import type { Density, Shared, Translate } from './shared.js';
import { age, filled, reading } from './units.js';

/** "CUDA 13.0 · CPU 14 % · RAM 87/512 GiB", or "ROCm 6.2.4 · amdgpu · …". */
export function machine({ host, driver, cuda, software }: Snapshot, t: Translate): string[] {
  const busy = host.cpu_utilization ?? null;
  return (
    [
      cuda ? `CUDA ${cuda}` : driver && t('driver %1', driver),
      ...(software ?? []),
      busy === null ? '' : `CPU ${reading(busy, '%')}`,
      host.memory_total && `RAM ${filled(host.memory_used, host.memory_total)}`,
    ]
      .filter(Boolean)
      // A number and its unit stay on one line.
      .map((part) => String(part).replaceAll(' ', '\u00a0'))
  );
}

/** What of a machine is only told when asked. */
export function details({ driver, host }: Snapshot, t: Translate): string {
  const cores = host.cpu_count ? `${host.cpu_count} CPU${host.cpu_count > 1 ? 's' : ''}` : '';
  return [driver && t('driver %1', driver), cores].filter(Boolean).join(' · ');
}

/** A host's name above its GPUs. */
export class HostHead {
  readonly node: HTMLElement;
  #shared: Shared;
  #name = new Field('h2');
  #silent = new Field('span', 'warn');
  #machine = h('span', 'dim');
  #said = '';

  constructor(shared: Shared) {
    this.#shared = shared;
    this.node = h('div', 'host-head', this.#name.node, this.#silent.node, this.#machine);
  }

  update(snapshot: Snapshot, silent = 0): void {
    const { t } = this.#shared;
    const name = snapshot.host.name ?? t('a host without a name');
    this.#name.say(name).hint([name, details(snapshot, t)].filter(Boolean).join(' · '));
    this.#silent.offer(silent ? t('no answer for %1', age(silent)) : '');
    const said = machine(snapshot, t).join(' · ');
    if (said === this.#said) return;
    this.#said = said;
    this.#machine.replaceChildren(...parts(said));
  }
}

/** Another host. */
export class HostSection {
  readonly node: HTMLElement;
  views: View[] = [];
  #shared: Shared;
  #head: HostHead;
  #problems = new Problems();
  #none: HTMLElement;
  #gpus: Gpus;
  #look: () => { density: Density; of: number };

  /** `look`: how its GPUs are to look, and how many there are on all hosts. */
  constructor(shared: Shared, gpus: Gpus, look: () => { density: Density; of: number }) {
    [this.#shared, this.#gpus, this.#look] = [shared, gpus, look];
    this.#head = new HostHead(shared);
    this.#none = h('p', 'dim', shared.t('No GPU is visible there.'));
    const nodes = [this.#head.node, this.#problems.node, this.#none, gpus.node];
    this.node = h('section', 'host-section', ...nodes);
  }

  get lines(): boolean {
    return this.#gpus.lines;
  }

  update({ snapshot, silent }: OtherHost): void {
    const { density, of } = this.#look();
    const some = snapshot.gpus.length > 0;
    this.#head.update(snapshot, silent);
    const label = this.#shared.t('GPUs of %1', snapshot.host.name ?? '');
    if (this.node.ariaLabel !== label) this.node.ariaLabel = label;
    this.node.classList.toggle('silent', silent > 0);
    this.#problems.update(broken(snapshot));
    show(this.#none, !some);
    show(this.#gpus.node, some);
    this.#gpus.density = density;
    this.views = this.#gpus.update(snapshot, of);
  }

  draw(): void {
    this.#gpus.draw();
  }

  dispose(): void {
    this.#gpus.dispose();
  }
}

export class Machines {
  readonly node = h('div');
  density: Density = 'auto';
  /** Whether the GPUs are lines now. */
  lines = false;
  /** Other hosts. */
  hosts: OtherHost[] = [];
  #head: HostHead;
  #problems = new Problems();
  #gpus: Gpus;
  #own: HTMLElement;
  #others: Rows<OtherHost, HostSection>;
  #legend: Legend;
  #count = 0;

  /** `instead` are shown in the place of the server's GPUs where it has none. */
  constructor(
    shared: Shared,
    sight: Sight,
    wide: boolean,
    changed: () => void,
    ...instead: HTMLElement[]
  ) {
    this.#head = new HostHead(shared);
    this.#gpus = new Gpus(shared, sight, wide, changed);
    const look = () => ({ density: this.density, of: this.#count });
    this.#others = new Rows(
      h('div'),
      () => new HostSection(shared, new Gpus(shared, sight, wide, changed), look),
    );
    this.#legend = new Legend(shared);
    this.#own = h('div', '', this.#head.node, this.#problems.node, ...instead, this.#gpus.node);
    this.node.append(this.#own, this.#others.node, this.#legend.node);
    show(this.#head.node, false);
    show(this.#gpus.node, false);
    show(this.#legend.node, false);
  }

  /** How many GPUs all hosts have. */
  get count(): number {
    return this.#count;
  }

  /** The GPUs of all hosts as of now; what a silent host said last has its age. */
  together(own: Snapshot): Snapshot {
    if (!this.hosts.length) return own;
    const all = [own, ...this.hosts.map(({ snapshot }) => snapshot)];
    return {
      ...own,
      gpus: all.flatMap(({ gpus }) => gpus),
      processes: all.flatMap(({ processes }) => processes),
    };
  }

  update(snapshot: Snapshot): void {
    const several = this.hosts.length > 0;
    this.#count = whole(this.together(snapshot).gpus).length;
    show(this.#head.node, several);
    if (several) this.#head.update(snapshot);
    this.#problems.update(broken(snapshot));
    this.#gpus.density = this.density;
    const views = this.#gpus.update(snapshot, this.#count);
    this.lines = this.#gpus.lines;
    this.#others.update(this.hosts.map((host) => [host.key, host] as const));
    for (const host of this.#others.rows) {
      views.push(...host.views);
      this.lines ||= host.lines;
    }
    this.#legend.update(views);
    show(this.#legend.node, views.length > 0);
    const none = snapshot.gpus.length === 0;
    show(this.#gpus.node, !none);
    // What is there comes before why there is none here.
    const first = none && several ? this.#others.node : this.#own;
    if (this.node.firstChild !== first) this.node.prepend(first);
  }

  draw(): void {
    this.#gpus.draw();
    for (const host of this.#others.rows) host.draw();
  }

  dispose(): void {
    this.#gpus.dispose();
    this.#others.update([]);
  }
}

/** The GPUs of the server's host, and where kernels run on others, those of each below its name. */

import type { OtherHost, Snapshot } from '../snapshot.js';
import { Problems } from './doctor.js';
import { h, Rows, show } from './dom.js';
import { Gpus } from './gpus.js';
import { HostHead, HostSection } from './host.js';
import { Legend } from './legend.js';
import type { Sight } from './page.js';
import type { Density, Shared } from './shared.js';
import { whole } from './split.js';
import { broken } from './words.js';

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

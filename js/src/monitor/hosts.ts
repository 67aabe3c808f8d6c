/** Show the GPUs of hosts other than the server's, each below the host's name. */

import type { OtherHost, Snapshot } from '../snapshot.js';
import { Load } from './bars.js';
import type { Visibility } from './browser.js';
import { Problems } from './doctor.js';
import { Field, h, Rows, show } from './dom.js';
import { Gpus } from './gpus.js';
import { broken, drivers, gpuCount } from './names.js';
import type { Shared } from './shared.js';
import { age } from './units.js';

export const HOSTS_CSS = `\
.host-head{align-items:baseline;display:flex;flex-wrap:wrap;gap:0 8px;padding:0 0 4px}\
.host-head h2{margin:0;overflow-wrap:anywhere}\
.host-head span{font-size:11px}\
.host-section{border-top:1px solid var(--line);margin-top:10px;padding-top:7px}\
.silent .gpus{filter:grayscale(1)}\
`;

/** A host's name above its GPUs. */
class HostHead {
  readonly node: HTMLElement;
  #shared: Shared;
  #name = new Field('h2');
  #silent = new Field('span', 'warn');
  #drivers = new Field('span', 'dim');
  #load = new Load();

  constructor(shared: Shared) {
    this.#shared = shared;
    const fields = [this.#name, this.#silent, this.#drivers].map(({ node }) => node);
    this.node = h('div', 'host-head', ...fields, this.#load.node);
  }

  update(snapshot: Snapshot, silent: number): void {
    const { trans } = this.#shared;
    const name = snapshot.host.name ?? trans.__('a host without a name');
    this.#name.text(name).title(name);
    this.#silent.textOrHide(silent ? trans.__('no answer for %1', age(silent)) : '');
    this.#drivers.text(drivers(snapshot, trans).join(' · '));
    this.#load.update(snapshot.host);
  }
}

interface Item extends OtherHost {
  /** The number of GPUs on all hosts. */
  total: number;
}

/** One host with its problems and GPUs. */
class HostSection {
  readonly node: HTMLElement;
  readonly gpus: Gpus;
  #shared: Shared;
  #head: HostHead;
  #problems = new Problems();
  #none: HTMLElement;

  constructor(shared: Shared, visibility: Visibility) {
    this.#shared = shared;
    this.#head = new HostHead(shared);
    this.gpus = new Gpus(shared, visibility);
    this.#none = h('p', 'dim', shared.trans.__('No GPU is visible there.'));
    const { node, notebooks } = this.gpus;
    const nodes = [this.#head.node, this.#problems.node, notebooks.node, this.#none, node];
    this.node = h('section', 'host-section', ...nodes);
  }

  update({ snapshot, silent, total }: Item): void {
    const some = snapshot.gpus.length > 0;
    this.#head.update(snapshot, silent);
    const label = this.#shared.trans.__('GPUs of %1', snapshot.host.name ?? '');
    if (this.node.ariaLabel !== label) this.node.ariaLabel = label;
    this.node.classList.toggle('silent', silent > 0);
    this.#problems.update(broken(snapshot));
    show(this.#none, !some);
    show(this.gpus.node, some);
    this.gpus.update(snapshot, total);
  }

  dispose(): void {
    this.gpus.dispose();
  }
}

export class OtherHosts {
  readonly node = h('div');
  /** The name of the server's host, shown only if there are others. */
  readonly head: HTMLElement;
  #shared: Shared;
  #own: HostHead;
  #sections: Rows<Item, HostSection>;

  constructor(shared: Shared, visibility: Visibility) {
    this.#shared = shared;
    this.#own = new HostHead(shared);
    this.head = this.#own.node;
    this.head.hidden = true;
    this.#sections = new Rows(this.node, () => new HostSection(shared, visibility));
  }

  /** Show the other hosts; `total` is the number of GPUs on all hosts. */
  update(own: Snapshot, total: number): void {
    const { hosts } = this.#shared;
    show(this.head, hosts.length > 0);
    this.#own.update(own, 0);
    this.#sections.update(
      hosts.map((host) => ({ ...host, total })),
      ({ key }) => key,
    );
  }

  /** Return "3 hosts · 12 GPUs"; empty if there are no others. */
  summarize(total: number): string {
    const { trans, hosts } = this.#shared;
    return hosts.length
      ? `${trans.__('%1 hosts', hosts.length + 1)} · ${gpuCount(trans, total)}`
      : '';
  }

  /** Return the server's snapshot with the GPUs of all hosts. */
  together(own: Snapshot): Snapshot {
    const all = [own, ...this.#shared.hosts.map(({ snapshot }) => snapshot)];
    const gpus = all.flatMap(({ gpus }) => gpus);
    return { ...own, gpus, processes: all.flatMap(({ processes }) => processes) };
  }

  draw(): void {
    for (const { gpus } of this.#sections.rows) gpus.draw();
  }

  dispose(): void {
    this.#sections.update([], () => '');
  }
}

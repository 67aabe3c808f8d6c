/** A machine in a line, and where there are several, the GPUs of another one below its name. */

import type { OtherHost, Snapshot } from '../snapshot.js';
import { Problems } from './doctor.js';
import { Field, h, parts, show } from './dom.js';
import type { Gpus } from './gpus.js';
import type { Density, Shared, Translate } from './shared.js';
import type { View } from './split.js';
import { age, filled, reading } from './units.js';
import { broken } from './words.js';

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

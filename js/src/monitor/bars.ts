/** Draw bars: memory by owner, utilization, a measurement. */

import type { Host, TimingBar } from '../snapshot.js';
import { Field, h, show } from './dom.js';
import { OWNERS, type Owner, type Parts } from './owners.js';
import type { Shared } from './shared.js';
import { isFull, ram, reading, share, size } from './units.js';

/** The name of each owner. */
const ownerNames = ({ trans }: Shared): Record<Owner, string> => ({
  own: trans.__('this notebook'),
  ownOther: trans.__('my other notebooks'),
  other: trans.__('everyone else'),
  orphan: trans.__('orphaned'),
  system: trans.__('system'),
});

/** "this notebook 10.0 GiB", "system 640 MiB": the owners that hold something. */
export function describe(parts: Partial<Record<Owner, number>>, shared: Shared): string[] {
  const names = ownerNames(shared);
  return OWNERS.flatMap((name) => (parts[name] ? `${names[name]} ${size(parts[name])}` : []));
}

/** Colored parts of a whole. */
class Strip {
  readonly node: HTMLElement;
  #columns = '';

  constructor(...css: string[]) {
    this.node = h('span', 'bar', ...css.map((name) => h('i', name)));
    this.node.ariaHidden = 'true';
  }

  /** Set the shares from 0 to 1, one for each part. */
  fill(shares: readonly number[]): void {
    let left = 1000;
    let columns = '';
    for (const share of shares) {
      const width = Math.min(Math.max(Math.round(share * 1000), 0), left);
      left -= width;
      columns += `${width / 10}% `;
    }
    // One write for all parts, and only after a visible change: 64 GPUs have 450 parts.
    if (columns !== this.#columns) this.node.style.gridTemplateColumns = this.#columns = columns;
  }
}

export class ShareBar extends Strip {
  constructor(css = 'busy') {
    super(css);
  }

  update(percent: number | null): void {
    this.fill([(percent ?? 0) / 100]);
  }
}

export class MemoryBar extends Strip {
  #shared: Shared;
  #parts: Parts | null = null;

  constructor(shared: Shared) {
    super(...OWNERS);
    this.#shared = shared;
    this.node.addEventListener('pointerenter', () => {
      if (this.#parts) this.node.title = this.#describe(this.#parts);
    });
  }

  update(parts: Parts, total: number | null): void {
    const whole = parts.known && total ? total : 0;
    this.#parts = parts;
    this.fill(OWNERS.map((name) => (whole ? parts[name] / whole : 0)));
  }

  #describe(parts: Parts): string {
    const { trans } = this.#shared;
    if (!parts.known) return trans.__('unknown');
    return [...describe(parts, this.#shared), `${trans.__('free')} ${size(parts.free)}`].join(', ');
  }
}

/** A device's bar during or after a measurement. */
export class TimingRow {
  #where = new Field();
  #bar = new ShareBar();
  #text = new Field('span', 'number');
  readonly node = h('div', 'slice pace', this.#where.node, this.#bar.node, this.#text.node);

  update({ where, share, text }: TimingBar): void {
    this.#where.text(where);
    this.#bar.update(100 * share);
    this.#text.text(text);
  }
}

/** A name, a bar, and a figure: "CPU ▮▮ 14 %". */
class Meter {
  #bar = new ShareBar();
  #text = new Field();
  readonly node: HTMLElement;

  constructor(name: string) {
    this.node = h('span', 'meter', name, this.#bar.node, this.#text.node);
  }

  update(percent: number | null, text: string | null, title = ''): void {
    show(this.node, text !== null);
    this.#bar.update(percent);
    this.#text.text(text ?? '').title(title);
  }
}

/** The load of a machine: its CPUs and its RAM. */
export class Load {
  #cpu = new Meter('CPU');
  #ram = new Meter('RAM');
  readonly node = h('div', 'load', this.#cpu.node, this.#ram.node);

  update(host: Host): void {
    const { cpu_count, cpu_utilization: cpu } = host;
    const [used, total] = ram(host);
    const count = cpu_count ? `${cpu_count} CPU${cpu_count > 1 ? 's' : ''}` : '';
    this.#cpu.update(cpu, cpu === null ? null : reading(cpu, '%'), count);
    this.#ram.update(
      (100 * (used ?? 0)) / (total || 1),
      total === null ? null : share(used, total),
    );
    this.#ram.node.classList.toggle('warn', isFull(host));
  }
}

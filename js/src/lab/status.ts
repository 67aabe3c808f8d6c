/** Show one GPU in the status bar; a click opens the panel. */

import { Widget } from '@lumino/widgets';
import type { Connection, Translate } from '../monitor/shared.js';
import type { Snapshot } from '../snapshot.js';
import { type Own, ownGpu, statusText } from './status-text.js';

const TROUBLE = 'color-mix(in srgb, var(--jp-warn-color1) 72%, var(--jp-ui-font-color1))';

export class StatusItem extends Widget {
  #button = document.createElement('button');
  #trans: Translate;
  #snapshot: Snapshot | null = null;
  #connection: Connection = { kind: 'connecting' };
  #kernel: string | null = null;
  /** The current notebook's GPU, as last known: not every snapshot has processes. */
  #own: Own | null = null;

  constructor(trans: Translate, pressed: () => void) {
    super();
    this.#trans = trans;
    this.addClass('jp-gpumagic-status');
    this.addClass('jp-mod-highlighted');
    this.#button.type = 'button';
    Object.assign(this.#button.style, {
      all: 'unset',
      outline: 'revert',
      cursor: 'pointer',
      padding: '0 8px',
      lineHeight: '24px',
      whiteSpace: 'nowrap',
      fontVariantNumeric: 'tabular-nums',
    });
    this.#button.addEventListener('click', pressed);
    this.node.append(this.#button);
    this.#draw();
  }

  snapshot(snapshot: Snapshot): void {
    this.#snapshot = snapshot;
    if (this.#kernel && snapshot.processes.length) this.#own = ownGpu(snapshot, this.#kernel);
    this.#draw();
  }

  connection(connection: Connection): void {
    this.#connection = connection;
    this.#draw();
  }

  /** Change the current notebook's kernel. */
  setCurrent(kernel: string | null): void {
    this.#kernel = kernel;
    this.#own = kernel && this.#snapshot ? ownGpu(this.#snapshot, kernel) : null;
    this.#draw();
  }

  #draw(): void {
    const trans = this.#trans;
    const lost = this.#connection.kind === 'lost';
    const { text, details, wrong, full } = this.#snapshot
      ? statusText(this.#snapshot, this.#own, trans)
      : { text: trans.__('GPU …'), details: '', wrong: false, full: false };
    const none = this.#snapshot?.gpus.length === 0;
    const hint = none ? trans.__('Show why, and virtual GPUs to try') : trans.__('Show the GPUs');
    const title = [lost ? this.#connection.text : '', details, hint].filter(Boolean).join('\n');
    // Screen readers read the text, and only when it changes.
    if (this.#button.textContent !== text) this.#button.textContent = text;
    if (this.#button.title !== title) this.#button.title = title;
    this.#button.style.opacity = lost ? '0.5' : '1';
    this.#button.style.color = full || wrong ? TROUBLE : '';
  }
}

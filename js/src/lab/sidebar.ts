/** The panel: a place in JupyterLab for the monitor, which wants nothing while it is not seen. */

import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';
import type { Translate } from '../monitor/shared.js';
import type { Deferred } from './deferred.js';
import { gpuIcon } from './icon.js';

export class Panel extends Widget {
  #monitor: Deferred;
  #seen: (visible: boolean) => void;

  constructor(
    monitor: Deferred,
    t: Translate,
    seen: (visible: boolean) => void,
    id = 'gpumagic-panel',
  ) {
    super();
    this.#monitor = monitor;
    this.#seen = seen;
    this.id = id;
    this.title.icon = gpuIcon;
    this.title.caption = t('GPUs');
    this.addClass('jp-gpumagic');
    // Focus goes here, and on with Tab to the first card.
    this.node.tabIndex = -1;
    Object.assign(this.node.style, { overflow: 'auto', outline: 'none' });
    this.node.append(monitor.node);
  }

  override dispose(): void {
    if (this.isDisposed) return;
    this.#seen(false);
    this.#monitor.dispose();
    super.dispose();
  }

  override processMessage(message: Message): void {
    super.processMessage(message);
    // Shown, hidden, attached, detached: so many are the ways to be seen or not.
    if (!message.type.startsWith('after-')) return;
    if (this.isVisible) void this.#monitor.load();
    this.#seen(this.isVisible);
  }

  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    this.node.focus();
  }
}

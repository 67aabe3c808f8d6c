/** Place the monitor in JupyterLab: the sidebar, and a page in the main area. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { WidgetTracker } from '@jupyterlab/apputils';
import { LabIcon } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';
import type { Translate } from '../monitor/shared.js';
import type { Deferred, Feeds } from './feeds.js';

export const gpuIcon = new LabIcon({
  name: 'gpumagic:gpu',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24"><path class="jp-icon3 jp-icon-selectable" fill="#616161" fill-rule="evenodd" d="M2 3v18h2v-2h2v2h12v-3h4V7H4V3zm3 6h15v7H5zm3.5 1a2.5 2.5 0 100 5 2.5 2.5 0 000-5zm0 1.5a1 1 0 110 2 1 1 0 010-2zm7-1.5a2.5 2.5 0 100 5 2.5 2.5 0 000-5zm0 1.5a1 1 0 110 2 1 1 0 010-2z"/></svg>`,
});

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

export class Tab {
  readonly tracker = new WidgetTracker<Panel>({ namespace: 'gpumagic-page' });
  #shell: JupyterFrontEnd.IShell;
  #feeds: Feeds;
  #make: () => Deferred;
  #t: Translate;
  #panel: Panel | null = null;

  /** `make` makes a monitor for it. */
  constructor(shell: JupyterFrontEnd.IShell, feeds: Feeds, make: () => Deferred, t: Translate) {
    [this.#shell, this.#feeds, this.#make, this.#t] = [shell, feeds, make, t];
  }

  /** Brings it to the front. */
  open(): void {
    const panel = this.#panel ?? this.#add();
    this.#shell.activateById(panel.id);
  }

  #add(): Panel {
    const monitor = this.#make();
    const panel = new Panel(monitor, this.#t, () => this.#feeds.look(), 'gpumagic-page');
    panel.title.label = this.#t('GPUs');
    panel.title.closable = true;
    panel.disposed.connect(() => {
      this.#feeds.remove(monitor);
      this.#panel = null;
    });
    this.#panel = panel;
    this.#feeds.add(monitor, () => panel.isVisible);
    void this.#feeds.past(monitor);
    this.#shell.add(panel, 'main');
    void this.tracker.add(panel);
    return panel;
  }
}

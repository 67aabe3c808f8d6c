/** The GPUs as a page in the main area, which can be docked wherever a notebook can. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { WidgetTracker } from '@jupyterlab/apputils';
import type { Translate } from '../monitor/shared.js';
import type { Deferred } from './deferred.js';
import type { Feeds } from './feeds.js';
import { Panel } from './sidebar.js';

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

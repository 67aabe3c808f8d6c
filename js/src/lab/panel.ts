/** Place the monitor in JupyterLab: in the sidebar, and as a page in the main area. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { WidgetTracker } from '@jupyterlab/apputils';
import { LabIcon } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';
import type { Monitor } from '../monitor/monitor.js';
import type { Translate } from '../monitor/shared.js';
import type { Feeds } from './feeds.js';

/** A GPU: a chip on a card. */
export const gpuIcon = new LabIcon({
  name: 'gpumagic:gpu',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24"><path class="jp-icon3 jp-icon-selectable" fill="#616161" fill-rule="evenodd" d="M2 3v18h2v-2h2v2h12v-3h4V7H4V3zm3 6h15v7H5zm3.5 1a2.5 2.5 0 100 5 2.5 2.5 0 000-5zm0 1.5a1 1 0 110 2 1 1 0 010-2zm7-1.5a2.5 2.5 0 100 5 2.5 2.5 0 000-5zm0 1.5a1 1 0 110 2 1 1 0 010-2z"/></svg>`,
});

/** The wait before the monitor's code is requested again. */
const AGAIN_MS = 3000;

/** Imports the monitor's code and creates a monitor. */
export type Create = (attempt: number) => Promise<Monitor>;

/** A place for a monitor, which is created when the place is first visible. */
export class Panel extends Widget {
  #create: Create;
  #feeds: Feeds;
  #trans: Translate;
  #monitor: Monitor | null = null;
  #status = document.createElement('p');
  #loading = false;
  #attempts = 0;

  constructor(id: string, create: Create, feeds: Feeds, trans: Translate) {
    super();
    [this.#create, this.#feeds, this.#trans] = [create, feeds, trans];
    this.id = id;
    this.title.icon = gpuIcon;
    this.title.caption = trans.__('GPUs');
    this.addClass('jp-gpumagic');
    // The focus goes here; Tab moves it to the first GPU.
    this.node.tabIndex = -1;
    Object.assign(this.node.style, { overflow: 'auto', outline: 'none' });
    Object.assign(this.#status.style, { color: 'var(--jp-ui-font-color2)', margin: '12px' });
    this.#status.setAttribute('role', 'status');
    this.node.append(this.#status);
  }

  override dispose(): void {
    if (this.isDisposed) return;
    super.dispose();
    if (!this.#monitor) return;
    this.#feeds.remove(this.#monitor);
    this.#monitor.dispose();
  }

  override processMessage(message: Message): void {
    super.processMessage(message);
    // After-show, after-hide, after-attach and after-detach.
    if (!message.type.startsWith('after-')) return;
    void this.#load();
    this.#feeds.changeWant();
  }

  async #load(): Promise<void> {
    if (!this.isVisible || this.#monitor || this.#loading) return;
    this.#loading = true;
    if (!this.#attempts) this.#status.textContent = this.#trans.__('connecting…');
    const monitor = await this.#create(this.#attempts++).catch(() => null);
    this.#loading = false;
    if (this.isDisposed) monitor?.dispose();
    else if (monitor) {
      this.#monitor = monitor;
      this.#status.replaceWith(monitor.node);
      this.#feeds.add(monitor, () => this.isVisible);
    } else {
      this.#status.textContent = this.#trans.__(
        'gpumagic does not answer on this server; jupyter server extension list shows if it is on.',
      );
      setTimeout(() => void this.#load(), AGAIN_MS);
    }
  }

  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    this.node.focus();
  }
}

/** The GPUs as a page in the main area; there is at most one. */
export class Page {
  readonly tracker = new WidgetTracker<Panel>({ namespace: 'gpumagic-page' });
  #shell: JupyterFrontEnd.IShell;
  #make: () => Panel;
  #panel: Panel | null = null;

  constructor(shell: JupyterFrontEnd.IShell, make: () => Panel) {
    [this.#shell, this.#make] = [shell, make];
  }

  open(): void {
    this.#panel ??= this.#add();
    this.#shell.activateById(this.#panel.id);
  }

  #add(): Panel {
    const panel = this.#make();
    panel.title.label = panel.title.caption;
    panel.title.closable = true;
    panel.disposed.connect(() => {
      this.#panel = null;
    });
    this.#shell.add(panel, 'main');
    void this.tracker.add(panel);
    return panel;
  }
}

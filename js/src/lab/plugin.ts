/** JupyterLab's plugin: one stream for the panel, the page, the status bar and the alerts. */

import {
  ILayoutRestorer,
  type JupyterFrontEnd,
  type JupyterFrontEndPlugin,
} from '@jupyterlab/application';
import { ICommandPalette, Notification } from '@jupyterlab/apputils';
import { PageConfig } from '@jupyterlab/coreutils';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator } from '@jupyterlab/translation';
import type { Monitor } from '../monitor/monitor.js';
import { type Actions, english, type Translate } from '../monitor/shared.js';
import { AlertPoll, Alerts } from './alerts.js';
import { Cells } from './cells.js';
import { ask, connections, followKernel, isAble, notebookNames } from './current-kernel.js';
import { Feeds } from './feeds.js';
import type { Hosts } from './hosts.js';
import { DoctorClient, Offers } from './no-gpu.js';
import { Timings, VariablesClient } from './notebook.js';
import { gpuIcon, Page, Panel } from './panel.js';
import { ProcessActions } from './process-actions.js';
import { Api, world as worldOf } from './server.js';
import { follow, read } from './settings.js';
import { StatusItem } from './status.js';
import { Stream } from './stream.js';

const ID = 'gpumagic:plugin';
const SHOW = 'gpumagic:show';
const PAGE = 'gpumagic:page';
const DOCTOR = 'gpumagic:doctor';
const TOUR = 'gpumagic:tour';
const VIRTUAL = 'gpumagic:virtual';
const ENABLE = 'gpumagic:enable';
const RANK = 600;
const DONE_MS = 10_000;

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'The GPUs of the machine, live: a panel, a status bar item, and alerts.',
  autoStart: true,
  optional: [ISettingRegistry, ILayoutRestorer, ICommandPalette, IStatusBar, ITranslator],
  activate,
};

export default plugin;

async function activate(
  app: JupyterFrontEnd,
  registry: ISettingRegistry | null,
  restorer: ILayoutRestorer | null,
  palette: ICommandPalette | null,
  statusBar: IStatusBar | null,
  translator: ITranslator | null,
): Promise<void> {
  const { commands, shell } = app;
  const trans: Translate = translator?.load('gpumagic') ?? english;
  let settings = read();

  const api = new Api(app.serviceManager.serverSettings);
  const world = worldOf(api);
  const stream = new Stream(world, trans);
  const feeds = new Feeds(stream, (path) => api.get(path));
  const cells = new Cells(app, trans);
  let here: string | null = null;
  const processes = new ProcessActions(app, api, cells, trans, () => ({
    latest: stream.latest,
    here,
  }));
  const doctor = new DoctorClient(
    api,
    (state) => feeds.set(state),
    (snapshot) => stream.show(snapshot),
  );
  const variables = new VariablesClient(
    (monitor) => feeds.isVisible(monitor),
    (answer) => feeds.set({ variables: answer }),
    trans,
  );
  const timings = new Timings((results) => feeds.set({ timings: results }));
  const done = (text: string) => void Notification.success(text, { autoClose: DONE_MS });
  const failed = (error: Error) => void Notification.error(error.message);
  const offers = new Offers(cells, (state) => feeds.set(state), done, trans);
  let hosts: Hosts | null = null;
  const asksKernels = isAble(app.version, PageConfig.getOption('untracked_message_types'));

  const panelOf = (id: string, wide: boolean, more: Actions): Panel => {
    const create = async (attempt: number) => {
      const { goTo, goToCell, interrupt, shutDown, terminate } = processes;
      const actions: Actions = {
        ...{ goTo, goToCell, interrupt, shutDown, terminate, ...more },
        doctor: () => void doctor.again(),
        variables: (open) => variables.want(monitor, open),
      };
      const module = await api.monitor(attempt);
      hosts ??= new module.Hosts(
        world,
        () => connections(shell),
        () => notebookNames(app),
        (others) => feeds.set({ hosts: others }),
        ask,
      );
      hosts.here(here);
      const monitor: Monitor = module.create(
        { translate: trans, label: trans.__('GPUs'), actions },
        wide,
      );
      return monitor;
    };
    return new Panel(id, create, feeds, () => void variables.look(), trans);
  };
  const page = new Page(shell, () => panelOf('gpumagic-page', true, {}));
  const panel = panelOf('gpumagic-panel', false, { page: () => page.open() });
  stream.subscribe(
    {
      snapshot: (snapshot) => {
        if (!feeds.anyVisible) return;
        doctor.snapshot(snapshot);
        if (asksKernels) hosts?.look(snapshot);
      },
    },
    null,
  );

  const show = async () => {
    // The palette takes the focus back when its command returns.
    await null;
    shell.activateById(panel.id);
  };
  const status = new StatusItem(trans, show);
  const inStatus = stream.subscribe(status, null);
  const alerts = new AlertPoll(
    new Alerts(settings.limits, trans),
    stream,
    world,
    (alert) => processes.notify(alert, show),
    processes.dismiss,
    processes.stopFilling,
  );

  await follow(registry, ID, (next) => {
    settings = next;
    feeds.set({ window: next.window });
    feeds.setPeriod(next.period);
    status.setHidden(!next.statusBar);
    inStatus.change(statusBar && next.statusBar ? { period: next.period } : null);
    alerts.setLimits(next.limits);
  });
  shell.add(panel, 'right', { rank: RANK });
  restorer?.add(panel, panel.id);
  void restorer?.restore(page.tracker, { command: PAGE, name: () => 'page' });
  statusBar?.registerStatusItem(ID, {
    item: status,
    align: 'left',
    rank: 100,
    isActive: () => settings.statusBar,
  });

  followKernel(shell, (kernel, context) => {
    here = kernel;
    feeds.set({ here });
    hosts?.here(here);
    offers.here(context);
    timings.here(context);
    variables.here(kernel, context);
    status.here(kernel);
    if (kernel) void alerts.processes();
  });

  const icon = gpuIcon;
  commands.addCommand(SHOW, { label: trans.__('Show GPUs'), execute: show });
  commands.addCommand(DOCTOR, {
    label: trans.__('GPU Doctor'),
    caption: trans.__('Find out why a GPU is not visible, and how to fix it'),
    icon,
    execute: () => {
      const wasVisible = panel.isVisible;
      void show();
      return doctor.toggle(wasVisible);
    },
  });
  commands.addCommand(VIRTUAL, {
    label: trans.__('Use 2 Virtual GPUs in This Notebook'),
    caption: trans.__('Without a GPU, virtual ones take its place'),
    icon,
    execute: () => offers.virtual().catch(failed),
  });
  commands.addCommand(PAGE, {
    label: trans.__('Open GPU Dashboard'),
    caption: trans.__('All GPUs in one chart, in the main area'),
    icon,
    execute: () => page.open(),
  });
  commands.addCommand(ENABLE, {
    label: trans.__('Load gpumagic in Every Notebook'),
    caption: trans.__('New kernels load it with its first magic. To undo: gpumagic disable'),
    execute: () =>
      offers
        .enable()
        .then(
          () => done(trans.__('New kernels load gpumagic when you first use one of its magics.')),
          failed,
        ),
  });
  commands.addCommand(TOUR, {
    label: trans.__('GPU Tour'),
    icon,
    execute: async () => {
      const { contents } = app.serviceManager;
      const path = 'gpu-tour.ipynb';
      const there = await contents.get(path, { content: false }).catch(() => null);
      if (!there) {
        const content = await api.get('tour');
        await contents.save(path, { type: 'notebook', format: 'json', content });
      }
      await show();
      return commands.execute('docmanager:open', { path });
    },
  });
  for (const command of [SHOW, PAGE, DOCTOR, VIRTUAL, ENABLE, TOUR])
    palette?.addItem({ command, category: trans.__('GPUs') });
}

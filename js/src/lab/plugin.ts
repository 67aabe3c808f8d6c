/** The parts put together: one stream for the panel, the status bar and the alerts. */

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
import { type Actions, english, type Translate } from '../monitor/shared.js';
import { Alerts, Watch } from './alerts.js';
import { connections, followKernel, names } from './current-kernel.js';
import { Deferred, Feeds } from './feeds.js';
import { Hosts, tellsApart } from './hosts.js';
import { Doctor, Offers } from './no-gpu.js';
import { gpuIcon, Panel, Tab } from './panel.js';
import { dismiss, Kernels, notify } from './process-actions.js';
import { Lines } from './run-in-kernel.js';
import { Api, page, storage } from './server.js';
import { follow, read } from './settings.js';
import { StatusItem } from './status.js';
import { Stream } from './stream.js';
import { Timings } from './timings.js';
import { HoldingsOf } from './variables.js';

const ID = 'gpumagic:plugin';
const SHOW = 'gpumagic:show';
const PAGE = 'gpumagic:page';
const DOCTOR = 'gpumagic:doctor';
const VIRTUAL = 'gpumagic:virtual';
const ENABLE = 'gpumagic:enable';
const RANK = 600;
const TOLD_MS = 10_000;

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'The GPUs of the machine, live: a panel, an item in the status bar, and alerts.',
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
  const words = translator?.load('gpumagic');
  const t: Translate = words ? (text, ...values) => words.__(text, ...values) : english;
  let settings = read();

  const api = new Api(app.serviceManager.serverSettings);
  const world = page(api);
  const stream = new Stream(world, t);
  const kernels = new Kernels(app, api, t, () => stream.latest);
  const held: HoldingsOf = new HoldingsOf((monitor) => feeds.isSeen(monitor), t);
  const feeds = new Feeds(
    stream,
    (path) => api.get(path),
    () => held.look(),
  );
  const actions: Actions = {
    ...kernels.actions(() => void doctor.again()),
    density: (density) => void registry?.set(ID, 'density', density),
  };
  const make = (more: Actions, wide = false) => {
    const holdings = (open: boolean) => held.want(made, open);
    const made: Deferred = new Deferred(
      (attempt) => api.renderer(attempt),
      { translate: t, label: t('GPUs'), actions: { ...actions, holdings, ...more }, wide },
      t,
    );
    return made;
  };
  const tab = new Tab(shell, feeds, () => make({}, true), t);
  const monitor = make({ page: () => tab.open(), room: () => panel.node.clientHeight });
  const timings = new Timings((results) => monitor.timings(results));
  const told = (text: string) => void Notification.success(text, { autoClose: TOLD_MS });
  const failed = (error: Error) => void Notification.error(error.message);
  const offers = new Offers(new Lines(app, t), monitor, told, t);
  const doctor = new Doctor(api, monitor, (snapshot) => stream.show(snapshot));

  const hosts = new Hosts(
    world,
    () => connections(shell),
    () => names(app),
    (told) => feeds.hosts(told),
  );
  if (tellsApart(app.version, PageConfig.getOption('untracked_message_types')))
    stream.subscribe({ snapshot: (own) => feeds.seen && hosts.look(own) }, null);

  const panel = new Panel(monitor, t, () => feeds.look());
  const isSeen = () => panel.isVisible;
  feeds.add(monitor, isSeen, (snapshot) => isSeen() && doctor.snapshot(snapshot));

  const show = async () => {
    // The palette gives the focus back as soon as its command returns: the panel is to have it.
    await null;
    shell.activateById(panel.id);
  };
  const status = new StatusItem(t, show);
  const inStatus = stream.subscribe(status, null);
  const alerts = new Alerts(settings.limits, t, storage());
  const watch = new Watch(
    alerts,
    stream,
    world,
    (alert) => notify(alert, kernels, t, show),
    dismiss,
  );

  let side = '';
  await follow(registry, ID, (next) => {
    settings = next;
    feeds.options({ density: next.density, window: next.window }, next.period);
    status.setHidden(!next.statusBar);
    inStatus.change(statusBar && next.statusBar ? { period: next.period } : null);
    watch.limits(next.limits);
    if (side !== next.side) shell.add(panel, next.side, { rank: RANK });
    side = next.side;
  });
  restorer?.add(panel, panel.id);
  void restorer?.restore(tab.tracker, { command: PAGE, name: () => 'page' });
  statusBar?.registerStatusItem(ID, {
    item: status,
    align: 'left',
    rank: 100,
    isActive: () => settings.statusBar,
  });

  followKernel(shell, (kernel, context) => {
    feeds.here(kernel);
    hosts.here(kernel);
    offers.here(context);
    timings.here(context);
    held.here(kernel, context);
    status.here(kernel);
    if (kernel) void watch.holders();
  });

  commands.addCommand(SHOW, { label: t('Show GPUs'), execute: show });
  commands.addCommand(DOCTOR, {
    label: t('GPU Doctor'),
    caption: t('What stands between this server and a GPU, and how to fix it'),
    icon: gpuIcon,
    execute: () => {
      const wasSeen = isSeen();
      void show();
      return doctor.call(wasSeen);
    },
  });
  commands.addCommand(VIRTUAL, {
    label: t('Use 2 Virtual GPUs in This Notebook'),
    caption: t('Virtual GPUs stand in where there is no GPU'),
    icon: gpuIcon,
    execute: () => offers.virtual().catch(failed),
  });
  commands.addCommand(PAGE, {
    label: t('GPUs as a Page'),
    caption: t('All GPUs in one chart, in the main area'),
    icon: gpuIcon,
    execute: () => tab.open(),
  });
  commands.addCommand(ENABLE, {
    label: t('Load gpumagic in Every Notebook'),
    caption: t('The first %gpus or %%ongpu then loads it; gpumagic disable takes this back'),
    execute: () =>
      offers
        .enable()
        .then(() => told(t('Kernels that start from now on load gpumagic by themselves.')), failed),
  });
  for (const command of [SHOW, PAGE, DOCTOR, VIRTUAL, ENABLE])
    palette?.addItem({ command, category: t('GPUs') });
}

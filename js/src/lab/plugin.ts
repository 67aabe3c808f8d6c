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
import type { Past } from '../monitor/past.js';
import { type Actions, english, type Translate } from '../monitor/shared.js';
import { AlertPoll, Alerts } from './alerts.js';
import { Cells } from './cells.js';
import { ask, connections, followKernel, isAble, notebookNames } from './current-kernel.js';
import { Feeds } from './feeds.js';
import type { Hosts } from './hosts.js';
import { DoctorClient, Offers } from './no-gpu.js';
import { Timings, VariablesClient } from './notebook.js';
import { gpuIcon as icon, Page, Panel } from './panel.js';
import { ProcessActions } from './process-actions.js';
import { Api, environment as environmentOf } from './server.js';
import { read, type Values } from './settings.js';
import { StatusItem } from './status.js';
import { Stream } from './stream.js';

const ID = 'gpumagic:plugin';
const PAGE = 'gpumagic:page';
const TOUR = 'gpu-tour.ipynb';
const RANK = 600;
const DONE_MS = 10_000;

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'The GPUs of the machine, live: a panel, a status bar item, and alerts.',
  autoStart: true,
  requires: [ISettingRegistry],
  optional: [ILayoutRestorer, ICommandPalette, IStatusBar, ITranslator],
  activate,
};

export default plugin;

async function activate(
  app: JupyterFrontEnd,
  registry: ISettingRegistry,
  restorer: ILayoutRestorer | null,
  palette: ICommandPalette | null,
  statusBar: IStatusBar | null,
  translator: ITranslator | null,
): Promise<void> {
  const { shell } = app;
  const registered = await registry.load(ID);
  const settings = () => read(registered.composite as unknown as Values);
  const trans: Translate = translator?.load('gpumagic') ?? english;
  const api = new Api(app.serviceManager.serverSettings);
  const environment = environmentOf(api);
  const stream = new Stream(environment, trans);
  const feeds = new Feeds(stream);
  const cells = new Cells(app, trans);
  let here: string | null = null;
  const state = () => ({ latest: stream.latest, here });
  const processes = new ProcessActions(app, api, cells, trans, state);
  const doctor = new DoctorClient(api, feeds, stream);
  const variables = new VariablesClient((answer) => feeds.set({ variables: answer }), trans);
  const timings = new Timings((results) => feeds.set({ timings: results }));
  const done = (text: string) => void Notification.success(text, { autoClose: DONE_MS });
  const offers = new Offers(cells, feeds, done, trans);
  let hosts: Hosts | null = null;
  let past: Past | null = null;

  const load = async (attempt: number, wide: boolean, more: Actions) => {
    const module = await api.monitor(attempt);
    hosts ??= new module.Hosts(
      environment,
      () => connections(shell),
      () => notebookNames(app),
      (others) => feeds.set({ hosts: others }),
      ask,
    );
    past ??= new module.Past();
    const { goTo, goToCell, interrupt, shutDown, terminate } = processes;
    const actions: Actions = {
      ...{ goTo, goToCell, interrupt, shutDown, terminate, ...more },
      doctor: () => void doctor.again(),
      variables: (pressed) => void variables.request(pressed),
    };
    return module.create({ translate: trans, label: trans.__('GPUs'), actions, past }, wide);
  };
  const panelOf = (id: string, wide: boolean, more: Actions): Panel =>
    new Panel(id, (attempt) => load(attempt, wide, more), feeds, trans);
  const page = new Page(shell, () => panelOf('gpumagic-page', true, {}));
  const panel = panelOf('gpumagic-panel', false, { page: () => page.open() });
  const asksKernels = isAble(app.version, PageConfig.getOption('untracked_message_types'));
  stream.subscribe(
    {
      snapshot: (snapshot) => {
        if (!feeds.anyVisible) return;
        doctor.snapshot(snapshot);
        if (asksKernels) hosts?.poll(snapshot);
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
  const changeStatus = stream.subscribe(status, null);
  const alerts = new AlertPoll(
    new Alerts(settings().limits, trans),
    stream,
    environment,
    (alert) => processes.notify(alert, show),
    processes.dismiss,
    processes.stopFilling,
  );

  const applySettings = () => {
    const { period, window, statusBar: inBar, limits } = settings();
    feeds.set({ window });
    feeds.setPeriod(period);
    status.setHidden(!inBar);
    changeStatus(statusBar && inBar ? { period } : null);
    alerts.setLimits(limits);
  };
  registered.changed.connect(applySettings);
  applySettings();
  shell.add(panel, 'right', { rank: RANK });
  restorer?.add(panel, panel.id);
  void restorer?.restore(page.tracker, { command: PAGE, name: () => 'page' });
  statusBar?.registerStatusItem(ID, {
    ...{ item: status, align: 'left', rank: 100 },
    isActive: () => !status.isHidden,
  });

  followKernel(shell, (kernel, context) => {
    here = kernel;
    feeds.set({ here });
    offers.setCurrent(context);
    timings.setCurrent(context);
    variables.setCurrent(kernel, context);
    status.setCurrent(kernel);
    if (kernel) void alerts.processes();
  });

  const failed = (error: Error) => void Notification.error(error.message);
  const commands: Record<string, Parameters<typeof app.commands.addCommand>[1]> = {
    'gpumagic:show': { label: trans.__('Show GPUs'), execute: show },
    [PAGE]: {
      label: trans.__('Open GPU Dashboard'),
      caption: trans.__('All GPUs in one chart, in the main area'),
      icon,
      execute: () => page.open(),
    },
    'gpumagic:doctor': {
      label: trans.__('GPU Doctor'),
      caption: trans.__('Find out why a GPU is not visible, and how to fix it'),
      icon,
      execute: () => {
        const wasVisible = panel.isVisible;
        void show();
        return doctor.toggle(wasVisible);
      },
    },
    'gpumagic:virtual': {
      label: trans.__('Use 2 Virtual GPUs in This Notebook'),
      caption: trans.__('Without a GPU, virtual ones take its place'),
      icon,
      execute: () => offers.virtual().catch(failed),
    },
    'gpumagic:enable': {
      label: trans.__('Load gpumagic in Every Notebook'),
      caption: trans.__('New kernels load it with its first magic. To undo: gpumagic disable'),
      execute: () =>
        offers
          .enable()
          .then(
            () => done(trans.__('New kernels load gpumagic when you first use one of its magics.')),
            failed,
          ),
    },
    'gpumagic:tour': {
      label: trans.__('GPU Tour'),
      icon,
      execute: () => show().then(() => tour(app, api)),
    },
  };
  for (const [command, options] of Object.entries(commands)) {
    app.commands.addCommand(command, options);
    palette?.addItem({ command, category: trans.__('GPUs') });
  }
}

/** Open the tour, which is written once into the server's folder. */
async function tour({ commands, serviceManager }: JupyterFrontEnd, api: Api): Promise<void> {
  const { contents } = serviceManager;
  const there = await contents.get(TOUR, { content: false }).catch(() => null);
  if (!there)
    await contents.save(TOUR, { type: 'notebook', format: 'json', content: await api.get('tour') });
  await commands.execute('docmanager:open', { path: TOUR });
}

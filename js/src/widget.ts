/** The notebook's host of the monitor: an anywidget over a sampler in the kernel. */

import { Monitor } from './monitor/monitor.js';
import {
  type CellRun,
  type History,
  type Holdings,
  type Result,
  type Snapshot,
  type Timing,
  TOO_LONG_S,
} from './snapshot.js';

/** What anywidget gives of a widget's model. */
interface Model {
  get(name: string): unknown;
  on(event: string, call: () => void): void;
  off(event: string, call: () => void): void;
  send(content: unknown): void;
}

/** How often a view says that it is there. */
const BEAT_MS = 10_000;
/** After so long without a snapshot the kernel is said not to answer. */
const PATIENCE_S = 15;

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  let wanted = false;
  const ask = (): void => {
    if (wanted && !busy()) say('holdings');
  };
  const monitor = new Monitor({
    actions: {
      holdings: (open) => {
        wanted = open;
        ask();
      },
    },
  });
  // Not crypto.randomUUID: a page over plain http has none.
  const id = `${Date.now()}-${Math.random()}`;
  const lost = (text: string): void => monitor.connection({ kind: 'lost', text });
  const busy = (): boolean => (model.get('cells') as CellRun[]).some((run) => run.end === null);
  const say = (type: string): void => {
    try {
      model.send({ type, id });
    } catch {
      // The kernel was started anew, and knows nothing of this.
      lost('the kernel was restarted: run the cell again');
    }
  };
  const look = (): void => say('look');
  let arrived = Date.now();

  const takes: Record<string, () => void> = {
    snapshot: () => {
      const snapshot = model.get('snapshot') as Partial<Snapshot>;
      if (!snapshot.gpus) return;
      arrived = Date.now();
      monitor.connection({ kind: 'live' });
      monitor.here(snapshot.processes?.find((process) => process.mine)?.kernel ?? null);
      monitor.update(snapshot as Snapshot);
    },
    history: () => {
      const history = model.get('history') as Partial<History>;
      if (history.time) monitor.seed(history as History);
    },
    cells: () => {
      monitor.mark(model.get('cells') as CellRun[]);
      const { seconds = 0 } = model.get('holdings') as Partial<Holdings>;
      if (seconds < TOO_LONG_S) ask();
    },
    holdings: () => {
      const held = model.get('holdings') as Partial<Holdings>;
      if (held.gpus) monitor.holdings(held as Holdings);
    },
    timing: () => monitor.timing(model.get('timing') as Timing),
    timings: () => monitor.timings(model.get('timings') as Result[]),
    results: () => monitor.results(model.get('results') as Result[]),
  };
  const beat = (): void => {
    look();
    const patience = Math.max(PATIENCE_S, 3 * (model.get('period') as number));
    if (Date.now() - arrived > 1000 * patience)
      lost(busy() ? 'waiting for the cell to end' : 'the kernel does not answer');
  };
  // A page in the background may have slept.
  const seen = (): void => {
    if (!document.hidden) look();
  };

  for (const [name, take] of Object.entries(takes)) {
    model.on(`change:${name}`, take);
    take();
  }
  const timer = setInterval(beat, BEAT_MS);
  document.addEventListener('visibilitychange', seen);
  // The notebook keeps a table for who opens it without us; it is this view's place while it lives.
  const hides = document.createElement('style');
  hides.textContent = `.${model.get('table')} { display: none }`;
  document.head.append(hides);
  el.append(monitor.node);
  look();
  return () => {
    clearInterval(timer);
    hides.remove();
    document.removeEventListener('visibilitychange', seen);
    for (const [name, take] of Object.entries(takes)) model.off(`change:${name}`, take);
    say('gone');
    monitor.dispose();
  };
}

// JupyterLab's panel fetches this same file for it.
export { Monitor };
export default { render };

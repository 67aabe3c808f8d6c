/** Show the monitor in a notebook: an anywidget whose snapshots come from the kernel. */

import { Monitor } from './monitor/monitor.js';
import type { State } from './monitor/shared.js';
import { type CellRun, type History, SLOW_S, type Snapshot, type Variables } from './snapshot.js';

/** The part of anywidget's model that is used. */
interface Model {
  get(name: string): unknown;
  on(event: string, call: () => void): void;
  off(event: string, call: () => void): void;
  send(content: unknown): void;
}

/** How often a view tells the kernel that it exists. */
const BEAT_MS = 10_000;
/** After so long without a snapshot, the view says that the kernel does not answer. */
const SILENT_S = 15;

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const get = <T>(name: string): T => model.get(name) as T;
  // crypto.randomUUID needs https.
  const id = `${Date.now()}-${Math.random()}`;
  /** The variables are unknown, or a cell has run since. */
  let due = true;
  let arrived = Date.now();

  const lost = (text: string): void => monitor.set({ connection: { kind: 'lost', text } });
  const busy = (): boolean => get<CellRun[]>('cells').some((run) => run.end === null);
  const send = (type: string): void => {
    try {
      model.send({ type, id });
    } catch {
      // A restarted kernel does not know this widget.
      lost('the kernel was restarted: run the cell again');
    }
  };
  const variables = (pressed: boolean): void => {
    if ((!due && !pressed) || busy()) return;
    due = false;
    send('variables');
  };
  const monitor = new Monitor({ actions: { variables } });

  const show = (name: keyof State) => () => monitor.set({ [name]: model.get(name) });
  const changed: Record<string, () => void> = {
    snapshot: () => {
      const snapshot = get<Partial<Snapshot>>('snapshot');
      if (!snapshot.gpus) return;
      arrived = Date.now();
      const here = snapshot.processes?.find((process) => process.mine)?.kernel ?? null;
      monitor.set({ connection: { kind: 'live' }, here });
      monitor.update(snapshot as Snapshot);
    },
    history: () => {
      const history = get<Partial<History>>('history');
      if (history.time) monitor.seed(history as History);
    },
    cells: () => {
      due ||= (get<Partial<Variables>>('variables').seconds ?? 0) < SLOW_S;
      monitor.mark(get('cells'));
    },
    variables: () => {
      const variables = get<Variables>('variables');
      if (variables.gpus) monitor.set({ variables });
    },
    timing: show('timing'),
    timings: show('timings'),
    results: show('results'),
  };
  const beat = (): void => {
    // The kernel pauses while no view is visible.
    if (document.hidden) return;
    send('alive');
    const patience = Math.max(SILENT_S, 3 * get<number>('period'));
    if (Date.now() - arrived > 1000 * patience)
      lost(busy() ? 'waiting for the cell to finish' : 'the kernel does not answer');
  };
  const shown = (): void => {
    arrived = Date.now();
    if (!document.hidden) send('alive');
  };

  for (const [name, call] of Object.entries(changed)) {
    model.on(`change:${name}`, call);
    call();
  }
  const timer = setInterval(beat, BEAT_MS);
  document.addEventListener('visibilitychange', shown);
  // The notebook's file has a table for readers without the widget. The view replaces it.
  const hides = document.createElement('style');
  hides.textContent = `.${model.get('table')} { display: none }`;
  document.head.append(hides);
  el.append(monitor.node);
  send('alive');
  return () => {
    clearInterval(timer);
    hides.remove();
    document.removeEventListener('visibilitychange', shown);
    for (const [name, call] of Object.entries(changed)) model.off(`change:${name}`, call);
    send('gone');
    monitor.dispose();
  };
}

export default { render };

/** Alerts as JupyterLab's notifications, which take no focus. */

import { Notification } from '@jupyterlab/apputils';
import type { Translate } from '../monitor/shared.js';
import type { Alert } from './findings.js';
import type { Kernels } from './kernels.js';

/** A fault stays until it is read; the rest goes by itself and is kept in the list. */
const SHOWN_MS = 20_000;

/** What is shown of faults, by the alert's key: it goes when they are over. */
const shown = new Map<string, string>();

export function notify(alert: Alert, kernels: Kernels, t: Translate, show: () => void): void {
  const { process } = alert;
  const offers: Notification.IAction[] = [];
  if (process) {
    offers.push({ label: t('Go to it'), callback: () => kernels.goTo(process) });
    // A kernel of another server is not this one's to end.
    if (!process.server)
      offers.push({ label: t('Shut down…'), callback: () => kernels.shutDown(process) });
  } else offers.push({ label: t('Show the GPUs'), callback: show });
  const fault = alert.kind === 'fault';
  const id = Notification.emit(alert.text, fault ? 'error' : 'warning', {
    autoClose: fault ? false : SHOWN_MS,
    actions: offers,
  });
  if (fault) shown.set(alert.key, id);
}

/** What was told of is over. */
export function dismiss(key: string): void {
  const id = shown.get(key);
  if (id !== undefined) Notification.dismiss(id);
  shown.delete(key);
}

/** Alerts as JupyterLab's notifications, which take no focus. */

import { Notification } from '@jupyterlab/apputils';
import type { Translate } from '../monitor/shared.js';
import type { Alert } from './findings.js';
import type { Kernels } from './kernels.js';

/** A fault stays until it is read; the rest goes by itself and is kept in the list. */
const SHOWN_MS = 20_000;

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
  Notification.emit(alert.text, fault ? 'error' : 'warning', {
    autoClose: fault ? false : SHOWN_MS,
    actions: offers,
  });
}

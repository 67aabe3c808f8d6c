/** Read the settings, which JupyterLab checks against the schema. */

import type { Limits } from './alerts.js';

/** The properties of schema/plugin.json. */
export interface Values extends Limits {
  period: number;
  history: number;
  statusBar: boolean;
}

/** The schema's defaults: JupyterLab gives none if a value of the user is invalid. */
const DEFAULTS: Values = {
  ...{ period: 1, history: 2, statusBar: true },
  ...{ memoryAlert: true, memoryPercent: 95, memorySeconds: 10 },
  ...{ heatAlert: true, heatSeconds: 30 },
  ...{ idleAlert: true, idleMinutes: 30, idleGiB: 1 },
  ...{ faultAlert: true, ramInterrupt: false },
};

/** Return the settings; `window` is the seconds that a chart shows. */
export function read(values: Partial<Values> = {}) {
  const { period, history, statusBar, ...limits } = { ...DEFAULTS, ...values };
  return { period, window: history * 60, statusBar, limits };
}

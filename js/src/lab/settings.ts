/** Read the settings, which JupyterLab checks against the schema and completes by its defaults. */

import type { Limits } from './alerts.js';

/** The properties of schema/plugin.json. */
export interface Values extends Limits {
  period: number;
  history: number;
  statusBar: boolean;
}

/** Return the settings; `window` is the seconds that a chart shows. */
export const read = ({ period, history, statusBar, ...limits }: Values) => ({
  ...{ period, statusBar, limits },
  window: history * 60,
});

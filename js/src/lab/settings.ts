/** Read the settings, which JupyterLab checks against the schema. */

import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import type { Limits } from './alerts.js';

export interface Settings {
  /** Seconds between snapshots. */
  period: number;
  /** Seconds that a chart shows. */
  window: number;
  statusBar: boolean;
  limits: Limits;
}

/** Those of the schema, for when it cannot be read. */
const DEFAULTS = {
  ...{ period: 1, history: 2, statusBar: true },
  ...{ memoryAlert: true, memoryPercent: 95, memorySeconds: 10 },
  ...{ heatAlert: true, heatSeconds: 30 },
  ...{ idleAlert: true, idleMinutes: 30, idleGiB: 1 },
  ...{ faultAlert: true, ramInterrupt: false },
};
type Values = Partial<typeof DEFAULTS>;

/** Return the settings for the user's values. */
export function read(composite: Values = {}): Settings {
  const { period, history, statusBar, idleGiB, ...rest } = { ...DEFAULTS, ...composite };
  const limits = { ...rest, idleBytes: idleGiB * 2 ** 30 };
  return { period, window: history * 60, statusBar, limits };
}

/** Call with the settings now and after each change; with the defaults if there are none. */
export async function follow(
  registry: ISettingRegistry | null,
  id: string,
  changed: (settings: Settings) => void,
): Promise<void> {
  const settings = await registry?.load(id).catch(() => null);
  const call = () => changed(read(settings?.composite as Values | undefined));
  settings?.changed.connect(call);
  call();
}

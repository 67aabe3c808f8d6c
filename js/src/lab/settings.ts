/** Read the settings; a missing or invalid value is the default of the schema. */

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

/** Read the user's settings merged with the defaults of the schema. */
export function read(composite: Readonly<Record<string, unknown>> = {}): Settings {
  const number = (key: string, otherwise: number, least: number, most: number) => {
    const value = composite[key];
    return typeof value === 'number' ? Math.min(most, Math.max(least, value)) : otherwise;
  };
  const on = (key: string) => composite[key] !== false;
  return {
    period: number('period', 1, 0.25, 60),
    window: number('history', 2, 0.5, 60) * 60,
    statusBar: on('statusBar'),
    limits: {
      memory: on('memoryAlert'),
      memoryPercent: number('memoryPercent', 95, 1, 100),
      memorySeconds: number('memorySeconds', 10, 0, 3600),
      heat: on('heatAlert'),
      heatSeconds: number('heatSeconds', 30, 0, 3600),
      idle: on('idleAlert'),
      idleMinutes: number('idleMinutes', 30, 0, 10_080),
      idleBytes: number('idleGiB', 1, 0, 1024) * 2 ** 30,
      fault: on('faultAlert'),
    },
  };
}

/** Call with the settings now and after each change; with the defaults if there are none. */
export async function follow(
  registry: ISettingRegistry | null,
  id: string,
  changed: (settings: Settings) => void,
): Promise<void> {
  const settings = await registry?.load(id).catch(() => null);
  settings?.changed.connect(() => changed(read(settings.composite)));
  changed(read(settings?.composite));
}

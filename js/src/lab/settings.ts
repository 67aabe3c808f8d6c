/** The settings as the schema has them, whatever stands in the file. */

import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import type { Density } from '../monitor/shared.js';
import type { Limits } from './alerts.js';

const DENSITIES: readonly Density[] = ['auto', 'cards', 'lines'];

export interface Settings {
  /** Seconds. */
  period: number;
  /** Seconds. */
  window: number;
  density: Density;
  side: 'left' | 'right';
  statusBar: boolean;
  limits: Limits;
}

/** Reads what the user's settings and the schema's defaults make together. */
export function read(composite: Readonly<Record<string, unknown>> = {}): Settings {
  const number = (key: string, otherwise: number, least: number, most: number) => {
    const value = composite[key];
    return typeof value === 'number' ? Math.min(most, Math.max(least, value)) : otherwise;
  };
  const on = (key: string, otherwise = true) => {
    const value = composite[key];
    return typeof value === 'boolean' ? value : otherwise;
  };
  return {
    period: number('period', 1, 0.25, 60),
    window: number('history', 2, 0.5, 60) * 60,
    density: DENSITIES.find((one) => one === composite.density) ?? 'auto',
    side: composite.side === 'left' ? 'left' : 'right',
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

/** Tells the settings at once, and whenever they change; the defaults where none can be had. */
export async function follow(
  registry: ISettingRegistry | null,
  id: string,
  changed: (settings: Settings) => void,
): Promise<void> {
  // A schema that is not there, or a file that is not right, is no reason to show nothing.
  const settings = await registry?.load(id).catch(() => null);
  settings?.changed.connect(() => changed(read(settings.composite)));
  changed(read(settings?.composite));
}

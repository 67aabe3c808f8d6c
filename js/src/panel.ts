/** The code that JupyterLab loads with its panel: the monitor with all parts, and other hosts. */

import { BUTTONS_CSS, ProcessButtons } from './monitor/buttons.js';
import { DEATHS_CSS, Deaths } from './monitor/deaths.js';
import { DOCTOR_CSS, Doctor } from './monitor/doctor.js';
import { Monitor } from './monitor/monitor.js';
import { OVERVIEW_CSS, Overview } from './monitor/overview.js';
import type { Options } from './monitor/shared.js';

/** Create the monitor; `wide`: as a page, with charts of all GPUs. */
export const create = (options: Options, wide = false): Monitor =>
  new Monitor({
    ...options,
    extras: {
      css: DOCTOR_CSS + DEATHS_CSS + OVERVIEW_CSS + BUTTONS_CSS,
      parts: (shared) => [
        new Deaths(shared),
        new Doctor(shared),
        ...(wide ? [new Overview(shared)] : []),
      ],
      buttons: (shared) => new ProcessButtons(shared),
    },
  });

export { Hosts } from './lab/hosts.js';
export { Past } from './monitor/past.js';

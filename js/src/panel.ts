/** The code that JupyterLab loads with its panel: the monitor with all parts, and other hosts. */

import { BUTTONS_CSS, ProcessButtons, tools } from './monitor/buttons.js';
import { DEATHS_CSS, Deaths, filling } from './monitor/deaths.js';
import { DOCTOR_CSS, Doctor } from './monitor/doctor.js';
import { HOSTS_CSS, OtherHosts } from './monitor/hosts.js';
import { Monitor } from './monitor/monitor.js';
import { OVERVIEW_CSS, Overview } from './monitor/overview.js';
import type { Options, Shared } from './monitor/shared.js';

/** Create the monitor; `wide`: as a page, with charts of all GPUs. */
export const create = (options: Options, wide = false): Monitor =>
  new Monitor({
    ...options,
    extras: {
      css: DOCTOR_CSS + DEATHS_CSS + OVERVIEW_CSS + BUTTONS_CSS + HOSTS_CSS,
      ...(wide ? { overview: (shared: Shared) => new Overview(shared) } : {}),
      tools,
      buttons: (shared) => new ProcessButtons(shared),
      hosts: (shared, visibility) => new OtherHosts(shared, visibility),
      deaths: (shared) => new Deaths(shared),
      filling,
      doctor: (shared) => new Doctor(shared),
    },
  });

export { Hosts } from './lab/hosts.js';

/** Show the buttons of a process: go to its notebook, interrupt, shut down, end. */

import type { ProcessSample } from '../snapshot.js';
import { button, h, icon, show } from './dom.js';
import type { Shared } from './shared.js';

export const BUTTONS_CSS = `\
.acts{background:var(--paper);border-radius:3px;box-shadow:-4px 0 4px var(--paper);display:flex;flex:none;opacity:0;position:absolute;right:0;bottom:0}\
.acts button{padding:1px 2px}.acts button:hover{background:var(--track)}\
.process:hover .acts,.acts:focus-within{opacity:1}.trouble .acts{box-shadow:none;margin:0 -4px;opacity:1;position:static}\
@media(hover:none){.acts{box-shadow:none;margin:0 -4px;opacity:1;position:static}}\
@media(forced-colors:active){.acts{opacity:1}}\
`;

type Act = 'goTo' | 'interrupt' | 'shutDown' | 'terminate';

const ICONS: Record<Act, string> = {
  goTo: 'M6 3.5h6.500v6.500M12 4L4 12',
  interrupt: 'M4.500 4.500h7v7h-7z',
  shutDown: 'M8 2.500v5M5 4.500a4.800 4.800 0 1 0 6 0',
  terminate: 'M4.500 4.500l7 7M11.500 4.500l-7 7',
};

/** Whether the action is possible: this server controls only its own kernels and orphans. */
function possible(act: Act, process: ProcessSample): boolean {
  if (act === 'terminate') return process.orphan && !process.elsewhere;
  if (process.orphan || process.server || !process.kernel) return false;
  return act !== 'goTo' || process.notebook !== null;
}

export class ProcessButtons {
  readonly node = h('span', 'acts');
  #buttons: [Act, HTMLButtonElement][] = [];
  #process: ProcessSample | null = null;

  constructor({ trans, actions }: Shared) {
    const titles: Record<Act, string> = {
      goTo: trans.__('Go to the notebook'),
      interrupt: trans.__('Interrupt the kernel'),
      shutDown: trans.__('Shut down the kernel'),
      terminate: trans.__('End orphaned process'),
    };
    for (const act of Object.keys(ICONS) as Act[]) {
      if (!actions[act]) continue;
      const press = () => this.#process && actions[act]?.(this.#process);
      const made = button('', press, icon(ICONS[act]));
      made.title = titles[act];
      this.#buttons.push([act, made]);
      this.node.append(made);
    }
  }

  /** Show the possible actions; none if `process` is null. */
  update(process: ProcessSample | null, name: string): void {
    this.#process = process;
    for (const [act, made] of this.#buttons) {
      const on = process !== null && possible(act, process);
      show(made, on);
      const label = `${made.title}: ${name}${process?.orphan ? ` (PID ${process.pid})` : ''}`;
      if (on && made.ariaLabel !== label) made.ariaLabel = label;
    }
    show(
      this.node,
      this.#buttons.some(([, made]) => !made.hidden),
    );
  }
}

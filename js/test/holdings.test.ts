import type { ISessionContext } from '@jupyterlab/apputils';
import { beforeEach, describe, expect, test, vi } from 'vitest';
import { VariablesClient } from '../src/lab/notebook.js';
import type { Monitor } from '../src/monitor/monitor.js';
import { english } from '../src/monitor/shared.js';
import type { Variable, Variables } from '../src/snapshot.js';
import widget from '../src/widget.js';
import { all, at, BUSY, fixture, mount, one, text } from './stage.js';
import { settled } from './world.js';

const MIB = 2 ** 20;
const row = (name: string, nbytes: number, more: Partial<Variable> = {}): Variable => ({
  ...{ name, kind: 'tensor', nbytes, made: '', aliases: [] },
  ...more,
});

/** The GPU of the fixture on which this notebook holds memory. */
const mine = (): string => {
  const found = fixture().processes.find((process) => process.mine);
  return found?.uuid ?? at(fixture().gpus, BUSY).uuid;
};

const held = (more: Partial<Variables> = {}): Variables => ({
  cell: 4,
  seconds: 0.01,
  gpus: {
    [mine()]: {
      allocated: 10 * MIB,
      rows: [
        row('net', 8 * MIB, { kind: 'parameters', made: 'In [3], line 5', aliases: ['model'] }),
        row('batch', MIB),
      ],
      more: 12,
      left: MIB,
    },
  },
  ...more,
});

describe('in a card', () => {
  const opener = '.variables:not([hidden]) > .open';
  const shown = (monitor: Monitor): HTMLElement => one(monitor, '.variables:not([hidden])');

  test('the largest are named while it is closed; a press lists them, the most first', () => {
    const asked: boolean[] = [];
    const monitor = mount(fixture(), { variables: (wanted) => asked.push(wanted) });
    // Only where this notebook holds something.
    const buttons = all(monitor, opener);
    const gpus = new Set(fixture().processes.flatMap((one) => (one.mine ? [one.uuid] : [])));
    expect(buttons).toHaveLength(gpus.size);
    expect(asked).toEqual(Array(gpus.size).fill(true));
    const button = at(buttons, 0);
    expect([button.textContent, button.getAttribute('aria-expanded')]).toEqual([
      'Variables',
      'false',
    ]);
    monitor.set({ variables: held() });
    monitor.draw();
    expect(button.textContent).toBe('Variables (14): net 8.0 MiB · batch 1.0 MiB');
    button.click();
    monitor.draw();
    expect(button.textContent).toBe('Variables (14)');
    expect(button.getAttribute('aria-expanded')).toBe('true');
    expect(text(monitor, '.holding .title')).toEqual(['net', 'batch']);
    expect(text(monitor, '.holding .size')).toEqual(['8.0 MiB', '1.0 MiB']);
    expect(text(monitor, '.holding .note')).toEqual(['In [3], line 5 · parameters', 'tensor']);
    expect(one(monitor, '.holding .title').title).toBe('net, model');
    expect(one(monitor, '.holding .bar').style.gridTemplateColumns.trim()).toBe('80%');
    expect(shown(monitor).textContent).toContain('12 more, 1.0 MiB');
    expect(shown(monitor).textContent).toContain('as of In [4]');
    button.click();
    monitor.draw();
    expect(all(monitor, '.holding').every((node) => node.closest('[hidden]'))).toBe(true);
    monitor.update({ ...fixture(), processes: [], time: fixture().time + 1 });
    monitor.draw();
    expect(asked.at(-1)).toBe(false);
  });

  test('what is not known is said, and what is slow is asked for by hand', () => {
    const monitor = mount(fixture(), { variables: () => {} });
    one(monitor, opener).click();
    monitor.set({ variables: 'This kernel has no gpumagic.' });
    monitor.draw();
    expect(shown(monitor).textContent).toContain('no gpumagic');
    monitor.set({ variables: held({ gpus: {} }) });
    monitor.draw();
    expect(shown(monitor).textContent).toContain('No torch memory on this GPU');
    const both = [row('data', MIB), row('data', 512, { kind: 'other library' })];
    monitor.set({
      variables: held({ gpus: { [mine()]: { allocated: MIB, rows: both, more: 0, left: 0 } } }),
    });
    monitor.draw();
    expect(text(monitor, '.holding .title')).toEqual(['data', 'data']);
    monitor.set({ variables: held({ seconds: 2 }) });
    monitor.draw();
    expect(shown(monitor).textContent).toContain('Refresh');
  });

  test('it stays open for a reader who opened it, and nobody is asked for one that went', () => {
    const asked: boolean[] = [];
    const open = () => mount(fixture(), { variables: (wanted) => asked.push(wanted) });
    const first = open();
    one(first, opener).click();
    first.update({ ...fixture(), gpus: [] });
    first.draw();
    expect(asked.at(-1)).toBe(false);
    expect(one(open(), opener).ariaExpanded).toBe('true');
    expect(asked.at(-1)).toBe(true);
  });

  test('a host that cannot ask has no such table', () => {
    expect(all(mount(), '.variables')).toEqual([]);
  });
});

class Signal {
  slots = new Set<(...said: unknown[]) => void>();
  connect = (slot: (...said: unknown[]) => void) => this.slots.add(slot);
  disconnect = (slot: (...said: unknown[]) => void) => this.slots.delete(slot);
  emit = (...said: unknown[]) => {
    for (const slot of this.slots) slot(null, ...said);
  };
}

/** A notebook whose kernel answers when a test says so. */
class Notebook {
  iopubMessage = new Signal();
  statusChanged = new Signal();
  asked: { code: string; silent: boolean; user_expressions: { held: string } }[] = [];
  answer: object = { status: 'ok', data: { 'application/json': held() } };
  status = 'ok';
  kernel = {
    id: 'k',
    status: 'idle',
    requestExecute: (content: (typeof this.asked)[0]) => {
      this.asked.push(content);
      const { answer, status } = this;
      return { done: Promise.resolve({ content: { status, user_expressions: { held: answer } } }) };
    },
  };
  session = { kernel: this.kernel };

  async becomes(status: string): Promise<void> {
    this.kernel.status = status;
    this.statusChanged.emit(status);
    await settled();
  }

  async runs(): Promise<void> {
    await this.becomes('busy');
    this.iopubMessage.emit({ header: { msg_type: 'execute_input' } });
    await this.becomes('idle');
  }
}

describe('the kernel of the current notebook', () => {
  let book: Notebook;
  let told: (Variables | string | null)[];
  let seen: boolean;
  let asks: VariablesClient;
  const monitor = {} as Monitor;
  const want = async (open: boolean) => {
    asks.want(monitor, open);
    await settled();
  };

  beforeEach(() => {
    book = new Notebook();
    [told, seen] = [[], true];
    asks = new VariablesClient(
      () => seen,
      (said) => told.push(said),
      english,
    );
    asks.here('k', book as unknown as ISessionContext);
  });

  test('is asked once when the table is opened, and after each cell while it is', async () => {
    await book.runs();
    expect(book.asked).toEqual([]);
    await want(true);
    expect(book.asked).toHaveLength(1);
    const [{ code, silent, user_expressions }] = book.asked as [(typeof book.asked)[0]];
    expect([code, silent]).toEqual(['', true]);
    expect(user_expressions.held).toContain('notebook_watch');
    expect(told).toEqual([null, held()]);
    // Its own question makes it busy and idle, too.
    await book.becomes('busy');
    await book.becomes('idle');
    expect(book.asked).toHaveLength(1);
    await book.runs();
    expect(book.asked).toHaveLength(2);
    await want(false);
    await book.runs();
    expect(book.asked).toHaveLength(2);
  });

  test('is left alone while a cell runs, and while nobody looks', async () => {
    book.kernel.status = 'busy';
    await want(true);
    expect(book.asked).toEqual([]);
    seen = false;
    await book.becomes('idle');
    expect(book.asked).toEqual([]);
    seen = true;
    void asks.look();
    await settled();
    expect(book.asked).toHaveLength(1);
  });

  test('is not asked by itself where that takes long', async () => {
    book.answer = { status: 'ok', data: { 'application/json': held({ seconds: 2 }) } };
    await want(true);
    await book.runs();
    expect(book.asked).toHaveLength(1);
    await want(true);
    expect(book.asked).toHaveLength(2);
  });

  test('that did not come to it is asked again when it is idle', async () => {
    book.status = 'aborted';
    await want(true);
    expect(told).toEqual([null]);
    book.status = 'ok';
    await book.becomes('idle');
    expect(told).toEqual([null, held()]);
  });

  test('that has no gpumagic, or fails, says so', async () => {
    book.answer = { status: 'error', ename: 'ModuleNotFoundError', evalue: 'No module' };
    await want(true);
    expect(told.at(-1)).toContain('%pip install gpumagic');
    book.answer = { status: 'error', ename: 'RuntimeError', evalue: 'it broke' };
    await book.runs();
    expect(told.at(-1)).toBe('it broke');
  });

  test('that runs a cell does not show the rows of the notebook before it', async () => {
    await want(true);
    await want(false);
    const other = new Notebook();
    Object.assign(other.kernel, { id: 'other', status: 'busy' });
    asks.here('other', other as unknown as ISessionContext);
    await want(true);
    expect(told.at(-1)).toBe(null);
    await other.becomes('idle');
    expect(other.asked).toHaveLength(1);
    expect(told.at(-1)).toEqual(held());
  });

  test('that starts anew, or is another one, takes the old rows away', async () => {
    await want(true);
    await book.becomes('autorestarting');
    expect(told.at(-1)).toBe(null);
    const other = new Notebook();
    other.kernel.id = 'other';
    asks.here('other', other as unknown as ISessionContext);
    await settled();
    expect(other.asked).toHaveLength(1);
    expect(book.iopubMessage.slots.size).toBe(0);
  });
});

test('in a widget the kernel is asked while they are visible, after each cell', () => {
  const sent: string[] = [];
  const calls = new Map<string, () => void>();
  const state: Record<string, unknown> = {
    ...{ period: 1, snapshot: fixture(), history: {}, results: [], timing: {}, timings: [] },
    ...{ cells: [], holdings: {}, table: 'kept' },
  };
  const model = {
    get: (name: string) => state[name],
    on: (event: string, call: () => void) => void calls.set(event, call),
    off: () => {},
    send: (content: unknown) => void sent.push((content as { type: string }).type),
  };
  const change = (name: string, value: unknown) => {
    state[name] = value;
    calls.get(`change:${name}`)?.();
  };
  vi.stubGlobal('requestAnimationFrame', (call: () => void) => {
    call();
    return 0;
  });
  const el = document.createElement('div');
  document.body.append(el);
  const close = widget.render({ model, el });
  const root = el.firstElementChild?.shadowRoot as ShadowRoot;
  const asked = () => sent.filter((type) => type === 'holdings').length;
  sent.length = 0;
  change('cells', []);
  expect(asked()).toBe(1);
  change('holdings', held());
  expect(root.querySelector('.variables:not([hidden])')?.textContent).toContain('net 8.0 MiB');
  change('cells', [{ id: 'a', start: 1, end: null, gpus: [] }]);
  expect(asked()).toBe(1);
  change('cells', [{ id: 'a', start: 1, end: 2, gpus: [] }]);
  expect(asked()).toBe(2);
  change('holdings', held({ seconds: 3 }));
  change('cells', []);
  expect(asked()).toBe(2);
  close();
});

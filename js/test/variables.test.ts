import type { ISessionContext } from '@jupyterlab/apputils';
import { beforeEach, describe, expect, test, vi } from 'vitest';
import { VariablesClient } from '../src/lab/notebook.js';
import type { Monitor } from '../src/monitor/monitor.js';
import { english } from '../src/monitor/shared.js';
import type { Variable, Variables } from '../src/snapshot.js';
import widget from '../src/widget.js';
import { settled } from './environment.js';
import { all, at, BUSY, fixture, mount, one, text } from './stage.js';

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

describe('the table of a GPU', () => {
  const opener = '.variables:not([hidden]) > .open';
  const shown = (monitor: Monitor): HTMLElement => one(monitor, '.variables:not([hidden])');

  test('names the largest while it is closed, and lists all when opened', () => {
    const requests: boolean[] = [];
    const monitor = mount(fixture(), { variables: (pressed) => requests.push(pressed) });
    // Only on GPUs where this notebook holds memory.
    const buttons = all(monitor, opener);
    const gpus = new Set(fixture().processes.flatMap((one) => (one.mine ? [one.uuid] : [])));
    expect(buttons).toHaveLength(gpus.size);
    expect(requests).toEqual(Array(gpus.size).fill(false));
    const button = at(buttons, 0);
    expect([button.textContent, button.ariaExpanded]).toEqual(['Variables', 'false']);
    monitor.set({ variables: held() });
    monitor.draw();
    expect(button.textContent).toBe('Variables (14): net 8.0 MiB · batch 1.0 MiB');
    button.click();
    monitor.draw();
    expect(button.textContent).toBe('Variables (14)');
    expect(button.ariaExpanded).toBe('true');
    expect(text(monitor, '.variable .title')).toEqual(['net', 'batch']);
    expect(text(monitor, '.variable .size')).toEqual(['8.0 MiB', '1.0 MiB']);
    expect(text(monitor, '.variable .note')).toEqual(['In [3], line 5 · parameters', 'tensor']);
    expect(one(monitor, '.variable .title').title).toBe('net, model');
    expect(one(monitor, '.variable .bar').style.gridTemplateColumns.trim()).toBe('80%');
    expect(shown(monitor).textContent).toContain('12 more, 1.0 MiB');
    expect(shown(monitor).textContent).toContain('as of In [4]');
    button.click();
    monitor.draw();
    expect(all(monitor, '.variable').every((node) => node.closest('[hidden]'))).toBe(true);
    requests.length = 0;
    monitor.update({ ...fixture(), processes: [], time: fixture().time + 1 });
    monitor.draw();
    expect(requests).toEqual([]);
  });

  test('says why variables are unknown, and has a button where a request is slow', () => {
    const requests: boolean[] = [];
    const monitor = mount(fixture(), { variables: (pressed) => requests.push(pressed) });
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
    expect(text(monitor, '.variable .title')).toEqual(['data', 'data']);
    expect(all(monitor, '.variables:not([hidden]) .note > .more:not([hidden])')).toEqual([]);
    monitor.set({ variables: held({ seconds: 2 }) });
    monitor.draw();
    one(monitor, '.variables:not([hidden]) .note > .more:not([hidden])').click();
    expect(requests.at(-1)).toBe(true);
  });

  test('stays open in a monitor that is created later', () => {
    const first = mount();
    one(first, opener).click();
    expect(one(mount(), opener).ariaExpanded).toBe('true');
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
  asked: { code: string; silent: boolean; user_expressions: { variables: string } }[] = [];
  answer: object = { status: 'ok', data: { 'application/json': held() } };
  status = 'ok';
  kernel = {
    id: 'k',
    status: 'idle',
    requestExecute: (content: (typeof this.asked)[0]) => {
      this.asked.push(content);
      const { answer: variables, status } = this;
      return { done: Promise.resolve({ content: { status, user_expressions: { variables } } }) };
    },
  };
  session = { kernel: this.kernel };

  runCell(): void {
    this.iopubMessage.emit({ header: { msg_type: 'execute_input' } });
  }
}

describe('the kernel of the current notebook', () => {
  let book: Notebook;
  let answers: (Variables | string | null)[];
  let client: VariablesClient;
  const request = async (pressed = false) => {
    await client.request(pressed);
    await settled();
  };
  const open = (id: string, notebook: Notebook) => {
    notebook.kernel.id = id;
    client.setCurrent(id, notebook as unknown as ISessionContext);
  };

  beforeEach(() => {
    book = new Notebook();
    answers = [];
    client = new VariablesClient((answer) => answers.push(answer), english);
    open('k', book);
  });

  test('is asked once, and again after each cell', async () => {
    await request();
    await request();
    expect(book.asked).toHaveLength(1);
    const [{ code, silent, user_expressions }] = book.asked as [(typeof book.asked)[0]];
    expect([code, silent]).toEqual(['', true]);
    expect(user_expressions.variables).toContain('notebook_watch');
    expect(answers).toEqual([null, held()]);
    book.runCell();
    expect(book.asked).toHaveLength(1);
    await request();
    expect(book.asked).toHaveLength(2);
  });

  test('is not asked while a cell runs', async () => {
    book.kernel.status = 'busy';
    await request(true);
    expect(book.asked).toEqual([]);
    book.kernel.status = 'idle';
    await request();
    expect(book.asked).toHaveLength(1);
  });

  test('is asked only when pressed if that takes long', async () => {
    book.answer = { status: 'ok', data: { 'application/json': held({ seconds: 2 }) } };
    await request();
    book.runCell();
    await request();
    expect(book.asked).toHaveLength(1);
    await request(true);
    expect(book.asked).toHaveLength(2);
  });

  test('is asked again if it skipped the request', async () => {
    book.status = 'aborted';
    await request();
    expect(answers).toEqual([null]);
    book.status = 'ok';
    await request();
    expect(answers).toEqual([null, held()]);
  });

  test('says that it has no gpumagic, or why it failed', async () => {
    book.answer = { status: 'error', ename: 'ModuleNotFoundError', evalue: 'No module' };
    await request();
    expect(answers.at(-1)).toContain('%pip install gpumagic');
    book.answer = { status: 'error', ename: 'RuntimeError', evalue: 'it broke' };
    await request(true);
    expect(answers.at(-1)).toBe('it broke');
  });

  test('takes the rows away when it restarts, or another notebook is current', async () => {
    await request();
    book.statusChanged.emit('autorestarting');
    expect(answers.at(-1)).toBe(null);
    const other = new Notebook();
    const late = client.request(false);
    open('other', other);
    await late;
    // The first kernel's answer came too late.
    expect(answers.at(-1)).toBe(null);
    await request();
    expect(other.asked).toHaveLength(1);
    expect(answers.at(-1)).toEqual(held());
    expect(book.iopubMessage.slots.size).toBe(0);
  });
});

test('a widget asks its kernel while the variables are visible, after each cell', () => {
  const sent: string[] = [];
  const calls = new Map<string, () => void>();
  const state: Record<string, unknown> = {
    ...{ period: 1, snapshot: fixture(), history: {}, results: [], timing: {}, timings: [] },
    ...{ cells: [], variables: {}, table: 'kept' },
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
  const asked = () => sent.filter((type) => type === 'variables').length;
  sent.length = 0;
  change('cells', []);
  expect(asked()).toBe(1);
  change('variables', held());
  expect(root.querySelector('.variables:not([hidden])')?.textContent).toContain('net 8.0 MiB');
  change('cells', [{ id: 'a', start: 1, end: null, gpus: [] }]);
  expect(asked()).toBe(1);
  change('cells', [{ id: 'a', start: 1, end: 2, gpus: [] }]);
  expect(asked()).toBe(2);
  change('variables', held({ seconds: 3 }));
  change('cells', []);
  expect(asked()).toBe(2);
  close();
});

import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import widget from '../src/widget.js';
import { snapshot } from './world.js';

class Model {
  said: { type: string; id: string }[] = [];
  calls = new Map<string, () => void>();
  state: Record<string, unknown> = {
    period: 1,
    snapshot: {},
    history: {},
    cells: [],
    results: [],
    timing: {},
    timings: [],
    holdings: {},
    table: 'kept',
  };
  get(name: string): unknown {
    return this.state[name];
  }
  on(event: string, call: () => void): void {
    this.calls.set(event, call);
  }
  off(event: string): void {
    this.calls.delete(event);
  }
  send(content: unknown): void {
    this.said.push(content as { type: string; id: string });
  }
}

beforeEach(() => {
  vi.useFakeTimers();
  vi.spyOn(HTMLCanvasElement.prototype, 'getContext').mockReturnValue(null);
});
afterEach(() => {
  vi.useRealTimers();
});

function open(model: Model): { el: HTMLElement; close: () => void; state: () => string } {
  const el = document.createElement('div');
  const close = widget.render({ model, el });
  const root = el.firstElementChild?.shadowRoot;
  return { el, close, state: () => root?.querySelector('[role=status]')?.textContent ?? '' };
}

test('a view says that it is there, again and again, and when it goes', () => {
  const model = new Model();
  const { el, close } = open(model);
  expect(document.head.textContent).toContain('.kept');
  vi.advanceTimersByTime(21_000);
  expect(model.said.map(({ type }) => type)).toEqual(['look', 'look', 'look']);
  document.dispatchEvent(new Event('visibilitychange'));
  expect(model.said).toHaveLength(4);
  // In a hidden tab it says nothing, and the kernel can rest.
  const hidden = vi.spyOn(document, 'hidden', 'get').mockReturnValue(true);
  document.dispatchEvent(new Event('visibilitychange'));
  vi.advanceTimersByTime(60_000);
  expect(model.said).toHaveLength(4);
  hidden.mockReturnValue(false);
  close();
  vi.advanceTimersByTime(60_000);
  expect(model.said.map(({ type }) => type).slice(4)).toEqual(['gone']);
  expect(new Set(model.said.map(({ id }) => id)).size).toBe(1);
  expect(document.head.textContent).toBe('');
  expect(model.calls.size).toBe(0);
  expect(el.childElementCount).toBe(0);
});

test('a kernel that is silent is said not to answer, until it does', () => {
  const model = new Model();
  const { close, state } = open(model);
  model.state['snapshot'] = snapshot(1);
  model.calls.get('change:snapshot')?.();
  expect(state()).toBe('');
  vi.advanceTimersByTime(20_000);
  expect(state()).toBe('the kernel does not answer');
  model.calls.get('change:snapshot')?.();
  expect(state()).toBe('');
  close();
});

test('a kernel that is silent while a cell runs is waited for', () => {
  const model = new Model();
  model.state['cells'] = [{ id: 'a', start: 1, end: null, gpus: [] }];
  const { close, state } = open(model);
  vi.advanceTimersByTime(20_000);
  expect(state()).toBe('waiting for the cell to finish');
  close();
});

test('what the kernel measures is shown as it comes', () => {
  const model = new Model();
  const { el, close } = open(model);
  const shown = () => el.firstElementChild?.shadowRoot?.querySelector('.results')?.textContent;
  model.state['timing'] = { line: 'cpu · repeat 2', bars: [{ where: 'cpu', share: 1, text: '' }] };
  model.calls.get('change:timing')?.();
  expect(shown()).toContain('cpu · repeat 2');
  model.state['timing'] = {};
  model.state['timings'] = [{ id: '1', title: 'a @ a', time: 1, text: 'x', bars: [] }];
  model.calls.get('change:timing')?.();
  model.calls.get('change:timings')?.();
  expect(shown()).not.toContain('repeat');
  expect(shown()).toContain('a @ a');
  close();
});

test('two views have two names', () => {
  const model = new Model();
  const views = [open(model), open(model)];
  expect(new Set(model.said.map(({ id }) => id)).size).toBe(2);
  for (const { close } of views) close();
});

test('where nothing can be sent any more, the cell is to be run again', () => {
  const model = new Model();
  const { close, state } = open(model);
  model.send = () => {
    throw new Error('Cannot send');
  };
  document.dispatchEvent(new Event('visibilitychange'));
  expect(state()).toBe('the kernel was restarted: run the cell again');
  close();
});

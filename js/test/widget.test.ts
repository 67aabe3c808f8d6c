import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import widget from '../src/widget.js';
import { snapshot } from './environment.js';
import './stage.js';

class Model {
  sent: { type: string; id: string }[] = [];
  calls = new Map<string, () => void>();
  state: Record<string, unknown> = {
    period: 1,
    snapshot: {},
    history: {},
    cells: [],
    results: [],
    timing: {},
    timings: [],
    variables: {},
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
    this.sent.push(content as { type: string; id: string });
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

test('a view sends heartbeats, and a message when it is closed', () => {
  const model = new Model();
  const { el, close } = open(model);
  expect(document.head.textContent).toContain('.kept');
  vi.advanceTimersByTime(21_000);
  expect(model.sent.map(({ type }) => type)).toEqual(['alive', 'alive', 'alive']);
  document.dispatchEvent(new Event('visibilitychange'));
  expect(model.sent).toHaveLength(4);
  // In a hidden tab it sends nothing, so that the kernel can pause.
  const hidden = vi.spyOn(document, 'hidden', 'get').mockReturnValue(true);
  document.dispatchEvent(new Event('visibilitychange'));
  vi.advanceTimersByTime(60_000);
  expect(model.sent).toHaveLength(4);
  hidden.mockReturnValue(false);
  close();
  vi.advanceTimersByTime(60_000);
  expect(model.sent.map(({ type }) => type).slice(4)).toEqual(['gone']);
  expect(new Set(model.sent.map(({ id }) => id)).size).toBe(1);
  expect(document.head.textContent).toBe('');
  expect(model.calls.size).toBe(0);
  expect(el.childElementCount).toBe(0);
});

test('a silent kernel is reported until it sends a snapshot', () => {
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

test('a kernel that runs a cell is waited for', () => {
  const model = new Model();
  model.state['cells'] = [{ id: 'a', start: 1, end: null, gpus: [] }];
  const { close, state } = open(model);
  vi.advanceTimersByTime(20_000);
  expect(state()).toBe('waiting for the cell to finish');
  close();
});

test('running and finished measurements are shown', () => {
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

test('two views have different ids', () => {
  const model = new Model();
  const views = [open(model), open(model)];
  expect(new Set(model.sent.map(({ id }) => id)).size).toBe(2);
  for (const { close } of views) close();
});

test('after a failed send, the view says to run the cell again', () => {
  const model = new Model();
  const { close, state } = open(model);
  model.send = () => {
    throw new Error('Cannot send');
  };
  document.dispatchEvent(new Event('visibilitychange'));
  expect(state()).toBe('the kernel was restarted: run the cell again');
  close();
});

import { beforeEach, expect, test, vi } from 'vitest';
import { resultOf, Timings } from '../src/lab/notebook.js';
import { Monitor } from '../src/monitor/monitor.js';
import type { TimingBar } from '../src/snapshot.js';
import { whole } from './stage.js';

const BARS: TimingBar[] = [
  { where: 'cpu', share: 1, text: '4.0 ms' },
  { where: 'cuda:0', share: 0.25, text: '1.0 ms' },
  { where: 'cuda:0+cuda:1', share: 0, text: 'waiting' },
];

beforeEach(() => {
  vi.spyOn(HTMLCanvasElement.prototype, 'getContext').mockReturnValue(null);
});

function mount(): { monitor: Monitor; root: ShadowRoot } {
  const monitor = new Monitor();
  document.body.append(monitor.node);
  monitor.update(whole());
  monitor.draw();
  return { monitor, root: monitor.node.shadowRoot as ShadowRoot };
}

const section = (root: ShadowRoot): HTMLElement => root.querySelector('.results') as HTMLElement;
const rows = (node: ParentNode): string[] =>
  [...node.querySelectorAll<HTMLElement>('.pace:not([hidden])')].map((row) => row.innerText);
const width = (row: Element | null | undefined): string | undefined =>
  row?.querySelector<HTMLElement>('.bar')?.style.gridTemplateColumns.trim();

// jsdom has no innerText.
Object.defineProperty(HTMLElement.prototype, 'innerText', {
  configurable: true,
  get(this: HTMLElement) {
    return this.textContent;
  },
});

test('without timings the section is hidden', () => {
  const { root } = mount();
  expect(section(root).hidden).toBe(true);
  expect(rows(root)).toEqual([]);
});

test('a running measurement has a bar for each device in the section', () => {
  const { monitor, root } = mount();
  monitor.set({ timing: { line: 'a @ a · cuda:0 · repeat 12', bars: BARS } });
  monitor.draw();
  expect(section(root).hidden).toBe(false);
  expect(section(root).querySelector('h2')?.textContent).toBe('Timings');
  expect(section(root).textContent).toContain('a @ a · cuda:0 · repeat 12');
  expect(rows(section(root))).toEqual(['cpu4.0 ms', 'cuda:01.0 ms', 'cuda:0+cuda:1waiting']);
  expect([...section(root).querySelectorAll('.pace')].map(width)).toEqual(['100%', '25%', '0%']);
});

test('bars grow in place and disappear at the end', () => {
  const { monitor, root } = mount();
  monitor.set({ timing: { line: 'x', bars: BARS } });
  monitor.draw();
  const bar = section(root).querySelectorAll('.pace')[1];
  monitor.set({ timing: { line: 'x', bars: [{ where: 'cuda:0', share: 0.5, text: '2.0 ms' }] } });
  monitor.draw();
  expect(section(root).querySelector('.pace')).toBe(bar);
  expect(width(bar)).toBe('50%');
  monitor.set({ timing: {} });
  monitor.draw();
  expect(rows(root)).toEqual([]);
  expect(section(root).hidden).toBe(true);
});

test('timings are listed newest first, and stay open while another one runs', () => {
  const { monitor, root } = mount();
  const made = { text: 'cuda:0 is 4 × faster', bars: BARS };
  monitor.set({
    timings: [
      { id: 'a', title: 'first', time: 1, ...made },
      { id: 'b', title: 'second', time: 2, ...made },
    ],
  });
  const titles = [...section(root).querySelectorAll('summary')].map((node) => node.textContent);
  expect(titles[0]).toContain('second');
  expect(titles[1]).toContain('first');
  const result = section(root).querySelector('.result') as HTMLElement;
  expect(result.textContent).toContain('4 × faster');
  expect(rows(result)).toEqual(['cpu4.0 ms', 'cuda:01.0 ms', 'cuda:0+cuda:1waiting']);
  const details = section(root).querySelector('details') as HTMLDetailsElement;
  details.open = true;
  monitor.set({ timing: { line: 'x', bars: BARS } });
  monitor.set({ timing: {} });
  expect(section(root).hidden).toBe(false);
  expect(section(root).querySelector('details')).toBe(details);
  expect(details.open).toBe(true);
  monitor.set({ timings: [] });
  expect(section(root).hidden).toBe(true);
});

test('other results have a section of their own', () => {
  const { monitor, root } = mount();
  monitor.set({ results: [{ id: 'a', title: 'plain', time: 1, text: 'x', bars: [] }] });
  const [timings, results] = root.querySelectorAll<HTMLElement>('.results');
  expect(timings?.hidden).toBe(true);
  expect(results?.hidden).toBe(false);
  expect(results?.querySelector('h2')?.textContent).toBe('Results');
});

test('each line shows the verdict and the time', () => {
  const { monitor, root } = mount();
  const text = 'cuda:0 is 4 times as fast as cpu\ncpu is virtual\n  a @ a\n\n  device  time';
  const time = new Date(2026, 10, 22, 17, 5).getTime() / 1000;
  monitor.set({ timings: [{ id: 'a', title: 'a @ a', time, text, bars: [] }] });
  const spans = [...section(root).querySelectorAll('summary > span')];
  expect(spans.map((node) => node.textContent)).toEqual([
    'a @ a',
    '17:05',
    'cuda:0 is 4 times as fast as cpu · cpu is virtual',
  ]);
});

const JSON_TYPE = 'application/vnd.gpumagic+json';
const message = (title: string, type = 'execute_result', data: object = {}) =>
  ({
    header: { msg_type: type, msg_id: title, date: '2026-11-22T17:05:00Z' },
    content: { data: { [JSON_TYPE]: { title, bars: BARS }, 'text/plain': 'text', ...data } },
  }) as never;

test('a displayed result is recognized by its MIME type', () => {
  expect(resultOf(message('a @ a'))).toMatchObject({ title: 'a @ a', text: 'text', bars: BARS });
  expect(resultOf(message('a @ a', 'stream'))).toBeNull();
  expect(resultOf(message('a @ a', 'display_data', { [JSON_TYPE]: undefined }))).toBeNull();
  const report = { record: 'Report', seconds: 1 };
  expect(resultOf(message('a @ a', 'display_data', { [JSON_TYPE]: report }))).toBeNull();
});

test('the timings of the current notebook are shown', () => {
  const shown: string[][] = [];
  const timings = new Timings((results) => shown.push(results.map(({ title }) => title)));
  const context = () => {
    const calls: ((context: unknown, message: never) => void)[] = [];
    const made = { iopubMessage: { connect: (call: never) => calls.push(call) } };
    return { made: made as never, say: (title: string) => calls[0]?.(made, message(title)) };
  };
  const [a, b] = [context(), context()];
  timings.setCurrent(a.made);
  a.say('a @ a');
  timings.setCurrent(b.made);
  a.say('later');
  timings.setCurrent(a.made);
  timings.setCurrent(null);
  expect(shown).toEqual([[], ['a @ a'], [], ['later', 'a @ a'], []]);
});

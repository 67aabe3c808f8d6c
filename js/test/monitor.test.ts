import { beforeEach, describe, expect, test, vi } from 'vitest';
import data from '../../tests/data/snapshot.json';
import { type Actions, Monitor } from '../src/monitor/monitor.js';
import { groups, split, views } from '../src/monitor/split.js';
import type { CellRun, GpuSample, ProcessSample, Snapshot } from '../src/snapshot.js';

const GIB = 2 ** 30;
const fixture = (): Snapshot => structuredClone(data);
const at = <T>(list: readonly T[], n: number): T => {
  const item = list.at(n);
  if (item === undefined) throw new Error(`there is no item ${n}`);
  return item;
};
const BUSY = 2;

/** Observers that say how many they watch, and can be told what happened. */
class Watcher {
  static all: Watcher[] = [];
  watched = new Set<Element>();
  call: (entries: object[]) => void;
  constructor(call: (entries: object[]) => void) {
    this.call = call;
    Watcher.all.push(this);
  }
  observe(node: Element): void {
    this.watched.add(node);
  }
  unobserve(node: Element): void {
    this.watched.delete(node);
  }
  disconnect(): void {
    this.watched.clear();
  }
}

let frames: (() => void)[] = [];
let strokes = 0;

beforeEach(() => {
  Watcher.all = [];
  frames = [];
  strokes = 0;
  sessionStorage.clear();
  document.body.replaceChildren();
  vi.stubGlobal('ResizeObserver', class extends Watcher {});
  vi.stubGlobal('IntersectionObserver', class extends Watcher {});
  vi.stubGlobal('requestAnimationFrame', (call: () => void) => frames.push(call));
  vi.stubGlobal('cancelAnimationFrame', () => {});
  const pen = new Proxy(
    { stroke: () => strokes++ },
    { get: (own, name) => Reflect.get(own, name) ?? (() => {}), set: () => true },
  );
  vi.spyOn(HTMLCanvasElement.prototype, 'getContext').mockReturnValue(pen as never);
});

function mount(snapshot: Snapshot | null = fixture(), actions: Actions = {}): Monitor {
  const monitor = new Monitor({ actions });
  document.body.append(monitor.node);
  if (snapshot) monitor.update(snapshot);
  monitor.draw();
  return monitor;
}

const root = (monitor: Monitor): ShadowRoot => monitor.node.shadowRoot as ShadowRoot;
const all = (monitor: Monitor, css: string): HTMLElement[] => [
  ...root(monitor).querySelectorAll<HTMLElement>(css),
];
const one = (monitor: Monitor, css: string): HTMLElement => at(all(monitor, css), 0);
const text = (monitor: Monitor, css: string): string[] =>
  all(monitor, css).map((node) => node.textContent ?? '');

function crowd(count: number): Snapshot {
  const snapshot = fixture();
  const model = at(snapshot.gpus, BUSY);
  snapshot.gpus = Array.from({ length: count }, (_, n) => ({
    ...model,
    uuid: `GPU-${n}`,
    index: n,
  }));
  snapshot.processes = [];
  return snapshot;
}

describe('what is shown', () => {
  test('a card for each GPU, with its name and what it is', () => {
    const monitor = mount();
    expect(text(monitor, '.card > .head .open')).toEqual(['GPU 0', 'GPU 1', 'GPU 2', 'cuda:0']);
    expect(text(monitor, '.card > .head .name')).toEqual([
      'H100 80GB HBM3',
      'H100 80GB HBM3',
      'H100 80GB HBM3',
      'virtual.ipynb',
    ]);
    expect(text(monitor, '.head .badge')).toEqual(['MIG', 'virtual']);
    expect(text(monitor, '.slice b')).toEqual(['MIG 1g.10gb']);
  });

  test('readings in the units of the table', () => {
    const monitor = mount();
    const card = at(all(monitor, '.card'), 1);
    expect([...card.querySelectorAll('.cap b')].map((node) => node.textContent)).toEqual([
      '97 %',
      '34.0 / 80.0 GiB',
    ]);
    expect(card.querySelector('.heat')?.textContent).toBe('88 °C · 698 / 700 W');
  });

  test('faults have badges, the power cap has none', () => {
    const monitor = mount();
    expect(text(monitor, '.body .badge')).toEqual([
      'Xid 63',
      'hot',
      'throttled: hardware thermal slowdown',
      'lost',
    ]);
  });

  test('what is not known is N/A and never 0', () => {
    const snapshot = fixture();
    const gpu = at(snapshot.gpus, BUSY);
    for (const name of [
      'memory_used',
      'memory_total',
      'utilization',
      'temperature',
      'power',
    ] as const)
      gpu[name] = null;
    snapshot.gpus = [gpu];
    snapshot.processes = [];
    const monitor = mount(snapshot);
    expect(text(monitor, '.cap b')).toEqual(['N/A', 'N/A']);
    expect(one(monitor, '.heat').textContent).toBe('N/A · N/A');
    expect(one(monitor, '.bar').getAttribute('aria-label')).toBe('not known how much is used');
    expect(one(monitor, '.card').textContent).not.toMatch(/\b0 /);
  });

  test('an opened card has rows only for what is known', () => {
    const monitor = mount();
    const [bare, full] = [at(all(monitor, '.card'), -1), at(all(monitor, '.card'), 1)];
    for (const card of [bare, full]) card.querySelector('button')?.click();
    const names = (card: Element): (string | null)[] =>
      [...card.querySelectorAll('dt')].map((node) => node.textContent);
    expect(names(bare)).toEqual(['UUID']);
    expect(names(full)).toContain('NVLink');
    expect(full.querySelector('dl')?.textContent?.replaceAll('\u00a0', ' ')).toContain(
      'gen 5 ×16 · ↓ 11.5 GiB/s · ↑ 296 MiB/s',
    );
  });

  test('problems with cause, cure, and what can be typed as code', () => {
    const snapshot = fixture();
    snapshot.problems = [
      { code: 'x', cause: 'no driver', cure: 'start it with --gpus all', uuid: null },
    ];
    const monitor = mount(snapshot);
    expect(text(monitor, '.problem')).toEqual(['No driver. Start it with --gpus all.']);
    expect(text(monitor, '.problem code')).toEqual(['--gpus all']);
  });

  test('a problem is read aloud when it comes, not each second that it lasts', () => {
    const snapshot = fixture();
    const problem = (seconds: number) => ({
      code: 'stalled',
      cause: `no answer for ${seconds} s`,
      cure: 'wait',
      uuid: null,
    });
    snapshot.problems = [problem(3)];
    const monitor = mount(snapshot);
    monitor.update({ ...snapshot, problems: [problem(4)] });
    monitor.draw();
    expect(text(monitor, '.problem')).toEqual(['No answer for 4 s. Wait.']);
    expect(text(monitor, '.spoken')).toEqual(['No answer for 3 s. Wait.']);
    const live = all(monitor, '[aria-live], [role=status]');
    expect(live.filter((node) => node.querySelector('.problem'))).toEqual([]);
  });

  test('without a GPU there is the doctor and a way to virtual ones', () => {
    const look = vi.fn();
    const monitor = mount({ ...fixture(), gpus: [], processes: [] }, { look });
    monitor.diagnose([
      { name: 'driver', ok: false, found: 'none', cure: 'install it' },
      { name: 'torch', ok: true, found: '2.13', cure: '' },
      { name: 'container', ok: null, found: 'no', cure: '' },
    ]);
    monitor.draw();
    expect(text(monitor, '.check > [role=img]')).toEqual(['✗', '✓', '·']);
    expect(one(monitor, '.doctor').textContent).toContain('%gpus --virtual 2');
    (one(monitor, '.again') as HTMLButtonElement).click();
    expect(look).toHaveBeenCalledOnce();
    monitor.update(fixture());
    monitor.diagnose(null);
    monitor.draw();
    expect(one(monitor, '.doctor').hidden).toBe(true);
  });

  test('before anything is known it says that it looks', () => {
    const monitor = mount(null);
    expect(one(monitor, '.bones').hidden).toBe(false);
    expect(one(monitor, '[role=status]').textContent).toBe('connecting…');
    monitor.connection({ kind: 'live' });
    expect(one(monitor, '[role=status]').textContent).toBe('');
  });

  test('names are text, whatever is in them', () => {
    const snapshot = fixture();
    const evil = '<img src=x onerror=alert(1)>';
    for (const gpu of snapshot.gpus) gpu.name = evil;
    for (const process of snapshot.processes) process.notebook = process.name = evil;
    snapshot.host.name = evil;
    snapshot.problems = [{ code: evil, cause: evil, cure: evil, uuid: evil }];
    const monitor = mount(snapshot);
    monitor.diagnose([{ name: evil, ok: null, found: evil, cure: evil }]);
    monitor.results([{ id: 'r', title: evil, time: 1, text: evil, html: evil }]);
    monitor.draw();
    expect(all(monitor, 'img, script')).toEqual([]);
    const html = at(all(monitor, '.result'), 0).shadowRoot as ShadowRoot;
    expect(html.querySelector('[onerror]')).toBeNull();
  });

  test('results stand newest first and keep their place', () => {
    const monitor = mount();
    const result = { text: 'text', html: null };
    monitor.results([{ ...result, id: 'a', title: 'older', time: 1 }]);
    const older = one(monitor, '.results details');
    monitor.results([
      { ...result, id: 'a', title: 'older', time: 1 },
      { ...result, id: 'b', title: 'newer', time: 2 },
    ]);
    expect(text(monitor, 'summary').map((title) => title.slice(0, 5))).toEqual(['newer', 'older']);
    expect(at(all(monitor, '.results details'), 1)).toBe(older);
  });

  test('every word passes through the translation', () => {
    const said: string[] = [];
    const monitor = new Monitor({
      translate: (words) => {
        said.push(words);
        return `«${words}»`;
      },
    });
    monitor.update(fixture());
    monitor.draw();
    expect(said).toContain('Utilisation');
    expect(text(monitor, '.cap .dim')).toContain('«Utilisation»');
    expect(one(monitor, '.legend').textContent).toContain('«this notebook»');
  });
});

describe('who holds what', () => {
  const gpu = (more: Partial<GpuSample> = {}): GpuSample => ({
    ...at(fixture().gpus, BUSY),
    memory_total: 80 * GIB,
    memory_used: 40 * GIB,
    memory_reserved: GIB,
    ...more,
  });
  const process = (more: Partial<ProcessSample>): ProcessSample => ({
    ...at(fixture().processes, 0),
    mine: false,
    notebook: null,
    kernel: null,
    idle_since: null,
    memory: 10 * GIB,
    ...more,
  });

  test('others are what is used and is no notebook’s', () => {
    const held = [
      process({ kernel: 'k1', notebook: 'a.ipynb' }),
      process({ kernel: 'k2', notebook: 'b.ipynb', memory: 5 * GIB }),
      process({ user: 'grace', name: null }),
    ];
    expect(split(gpu(), held, 'k1')).toEqual({
      mine: 10 * GIB,
      books: 5 * GIB,
      others: 25 * GIB,
      reserved: GIB,
      free: 39 * GIB,
      known: true,
    });
  });

  test('more than is used is never told', () => {
    const held = [process({ mine: true, memory: 90 * GIB }), process({ kernel: 'k2' })];
    const { mine, books, others } = split(gpu(), held, null);
    expect([mine, books, others]).toEqual([40 * GIB, 0, 0]);
    expect(split(gpu({ memory_used: null }), held, null).known).toBe(false);
  });

  test('workers count for their notebook, strangers for their user', () => {
    const found = groups(
      [
        process({ pid: 2, kernel: 'k1', notebook: 'a.ipynb', child: true, memory: GIB }),
        process({ pid: 1, kernel: 'k1', notebook: 'a.ipynb' }),
        process({ pid: 3, user: 'grace', name: null, memory: 20 * GIB }),
        process({ pid: 4, user: 'grace', name: null, memory: null }),
        process({ pid: 5, kernel: 'dead', orphan: true }),
      ],
      'k1',
    );
    expect(found.map(({ main, memory }) => [main.pid, (memory ?? 0) / GIB])).toEqual([
      [1, 11],
      [3, 20],
      [5, 10],
    ]);
  });

  test('what nobody visible holds is a row of its own', () => {
    const snapshot = { ...fixture(), gpus: [gpu()], processes: [] };
    expect(at(views(snapshot, null), 0).unseen).toBe(40 * GIB);
    expect(text(mount(snapshot), '.process')).toEqual(['others40.0 GiB']);
  });

  test('buttons only where they make sense, each with the process', () => {
    const actions = { goTo: vi.fn(), interrupt: vi.fn(), shutDown: vi.fn(), terminate: vi.fn() };
    const snapshot = { ...fixture(), gpus: [gpu()] };
    snapshot.processes = [
      process({ pid: 1, kernel: 'k1', notebook: 'a.ipynb', memory: 5 * GIB }),
      process({ pid: 2, kernel: 'k2', notebook: 'b.ipynb', server: 'http://x', memory: 4 * GIB }),
      process({ pid: 3, kernel: 'k3', orphan: true, memory: 3 * GIB }),
      process({ pid: 4, name: 'tritonserver', memory: 2 * GIB }),
    ];
    const monitor = mount(snapshot, actions);
    const buttons = all(monitor, '.process').map((row) => [
      ...row.querySelectorAll<HTMLButtonElement>('.acts:not([hidden]) button:not([hidden])'),
    ]);
    expect(buttons.map((row) => row.map((button) => button.ariaLabel))).toEqual([
      [
        'Go to the notebook: a.ipynb',
        'Interrupt the kernel: a.ipynb',
        'Shut down the kernel: a.ipynb',
      ],
      ['Go to the notebook: b.ipynb'],
      ['Terminate the orphan: python3 (pid 3)'],
      [],
      [],
    ]);
    for (const button of buttons.flat()) button.click();
    expect(actions.shutDown.mock.calls[0]?.[0].pid).toBe(1);
    expect(actions.terminate.mock.calls[0]?.[0].pid).toBe(3);
    expect(all(mount(snapshot), '.process button')).toEqual([]);
  });

  test('an idle notebook says for how long', () => {
    const snapshot = { ...fixture(), gpus: [gpu()] };
    const idle = (pid: number, s: number): ProcessSample =>
      process({ pid, kernel: `k${pid}`, notebook: `${pid}.ipynb`, idle_since: snapshot.time - s });
    snapshot.processes = [idle(1, 760), idle(2, 5)];
    expect(text(mount(snapshot), '.note:not([hidden])')).toEqual(['idle 12 min']);
  });
});

describe('many', () => {
  test('past eight GPUs they are lines, and an opened one is a card', () => {
    expect(all(mount(crowd(8)), '.line')).toEqual([]);
    const monitor = mount(crowd(9));
    expect(all(monitor, '.line')).toHaveLength(9);
    expect(all(monitor, 'canvas')).toEqual([]);
    one(monitor, '.line button').click();
    expect(all(monitor, 'canvas')).toHaveLength(2);
    expect(one(monitor, '.line button').getAttribute('aria-expanded')).toBe('true');
    // Not asked for lines, it has them all the same.
    monitor.options({ compact: false });
    monitor.draw();
    expect(all(monitor, '.line')).toHaveLength(9);
    const few = mount(crowd(2));
    few.options({ compact: true });
    few.draw();
    expect(all(few, '.line')).toHaveLength(2);
  });

  test('of lines, who holds memory is told over all', () => {
    const snapshot = crowd(9);
    const model = at(fixture().processes, 0);
    snapshot.processes = snapshot.gpus.map(({ uuid }) => ({ ...model, uuid, memory: GIB }));
    const row = one(mount(snapshot), '.held .process').textContent;
    expect(row).toContain('train.ipynb');
    expect(row).toContain('9 GPUs');
    expect(row).toContain('9.0 GiB');
  });
});

describe('updates', () => {
  test('the same again touches nothing', async () => {
    const monitor = mount();
    for (const button of all(monitor, '.open')) button.click();
    const seen: MutationRecord[] = [];
    const observer = new MutationObserver((records) => seen.push(...records));
    const everything = { childList: true, attributes: true, characterData: true, subtree: true };
    observer.observe(root(monitor), everything);
    monitor.update(fixture());
    monitor.draw();
    await Promise.resolve();
    expect(seen).toEqual([]);
    const hotter = fixture();
    at(hotter.gpus, BUSY).utilization = 12;
    monitor.update(hotter);
    monitor.draw();
    await Promise.resolve();
    expect(seen.map((record) => record.type)).toEqual(['characterData']);
    observer.disconnect();
  });

  test('a GPU that goes and comes back keeps its card open', () => {
    const monitor = mount();
    const button = at(all(monitor, '.open'), 1);
    button.click();
    monitor.update({ ...fixture(), gpus: fixture().gpus.slice(0, 2) });
    monitor.draw();
    expect(all(monitor, '.card')).toHaveLength(1);
    monitor.update(fixture());
    monitor.draw();
    expect(at(all(monitor, '.open'), 1).getAttribute('aria-expanded')).toBe('true');
    expect(at(all(mount(), '.open'), 1).getAttribute('aria-expanded')).toBe('true');
  });

  test('nothing is drawn with the next frame while it cannot be seen', () => {
    const monitor = mount();
    const sight = Watcher.all.find(({ watched }) => watched.has(monitor.node)) as Watcher;
    sight.call([{ target: monitor.node, isIntersecting: false }]);
    frames = [];
    monitor.update({ ...fixture(), time: fixture().time + 1 });
    expect(frames).toEqual([]);
    strokes = 0;
    sight.call([{ target: monitor.node, isIntersecting: true }]);
    for (const frame of frames) frame();
    expect(strokes).toBeGreaterThan(0);
  });

  test('a card that is not on the screen is neither written nor drawn until it is', () => {
    const monitor = mount();
    const card = at(all(monitor, '.card'), 1);
    const sight = Watcher.all.find(({ watched }) => watched.has(card)) as Watcher;
    sight.call([{ target: card, isIntersecting: false }]);
    const later = fixture();
    at(later.gpus, BUSY).utilization = 5;
    monitor.update(later);
    monitor.draw();
    expect(card.querySelector('.cap b')?.textContent).toBe('97 %');
    sight.call([{ target: card, isIntersecting: true }]);
    expect(card.querySelector('.cap b')?.textContent).toBe('5 %');
  });

  test('disposed, it observes nothing and draws nothing', () => {
    const monitor = mount();
    expect(Watcher.all.some(({ watched }) => watched.size > 0)).toBe(true);
    monitor.dispose();
    monitor.dispose();
    expect(Watcher.all.filter(({ watched }) => watched.size > 0)).toEqual([]);
    frames = [];
    monitor.update(fixture());
    expect(frames).toEqual([]);
    expect(monitor.node.isConnected).toBe(false);
  });
});

describe('marks', () => {
  const { time, gpus } = fixture();
  const uuid = at(gpus, BUSY).uuid;
  const run: CellRun = {
    id: 'a',
    kernel: null,
    notebook: 'work/train.ipynb',
    count: 12,
    start: time - 60,
    end: time - 48,
    gpus: [uuid],
  };
  const marked = (): Monitor => {
    const monitor = mount();
    const seconds = Array.from({ length: 100 }, (_, n) => time - 100 + n);
    const inside = (t: number): boolean => t >= run.start && t <= (run.end as number);
    monitor.seed({
      time: seconds,
      gpus: {
        [uuid]: {
          utilization: seconds.map((t) => (inside(t) ? 87 : 3)),
          memory_used: seconds.map((t) => (inside(t) ? 34.2 * GIB : GIB)),
        },
      },
    });
    monitor.mark([run]);
    monitor.draw();
    return monitor;
  };
  const tip = (monitor: Monitor): string | null =>
    one(monitor, '.tip').hidden ? null : one(monitor, '.tip').textContent;

  test('the keyboard finds a cell and what it did', () => {
    const monitor = marked();
    const canvases = all(monitor, 'canvas');
    expect(canvases.map((canvas) => canvas.tabIndex)).toEqual([-1, -1, 0, 0, -1, -1, -1, -1]);
    const canvas = at(canvases, 2);
    canvas.focus();
    expect(tip(monitor)).toBe('In [12] work/train.ipynb · 12 s · peak 34.2 GiB · mean 87 %');
    canvas.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }));
    expect(tip(monitor)).toBeNull();
  });

  test('so does the pointer', () => {
    const monitor = marked();
    const canvas = at(all(monitor, 'canvas'), 3);
    const move = (across: number): void => {
      const event = new MouseEvent('pointermove');
      Object.defineProperty(event, 'offsetX', { value: across });
      canvas.dispatchEvent(event);
    };
    // The chart is 200 wide and shows 120 s.
    move(200 * (1 - 54 / 120));
    expect(tip(monitor)).toContain('In [12] work/train.ipynb · 12 s');
    move(200 * (1 - 30 / 120));
    expect(tip(monitor)).toBe('1.0 GiB, 30 s ago');
    expect(one(monitor, '.tip').ariaLive).toBe('off');
    // The pointer rests, and time goes on under it.
    monitor.update({ ...fixture(), time: time + 30 });
    monitor.draw();
    expect(tip(monitor)).toBe('34.0 GiB, 30 s ago');
    canvas.dispatchEvent(new MouseEvent('pointerleave'));
    expect(tip(monitor)).toBeNull();
  });

  test('a cell told again is the same cell, and one without samples says so', () => {
    const monitor = marked();
    monitor.mark([{ ...run, start: time - 49.9, end: time - 49.7, count: null }]);
    monitor.draw();
    at(all(monitor, 'canvas'), 2).focus();
    expect(tip(monitor)).toMatch(/^In \[ \] work\/train.ipynb · 0.2 s · too short for a sample$/);
  });
});

import { describe, expect, test, vi } from 'vitest';
import { Monitor } from '../src/monitor/monitor.js';
import { all, at, BUSY, fixture, mount, one, root, text } from './stage.js';

describe('the monitor', () => {
  test('shows a row for each GPU, with its name and model', () => {
    const monitor = mount();
    expect(text(monitor, '.gpu > .head .open')).toEqual(['GPU 0', 'cuda:0', 'GPU 2']);
    expect(text(monitor, '.gpu > .head .model')).toEqual(['H100 MIG', 'H100', 'H100']);
    expect(one(monitor, '.model').title).toContain('H100 80GB HBM3');
    expect(text(monitor, '.slice b')).toEqual(['MIG 1g.10gb']);
  });

  test('shows readings in the units of %gpus', () => {
    const monitor = mount();
    const card = at(all(monitor, '.gpu'), 1);
    expect([...card.querySelectorAll('.cap b')].map((node) => node.textContent)).toEqual([
      '97 %',
      '34/80 GiB',
    ]);
    expect(card.querySelector('.head')?.textContent).toBe(
      'cuda:0H10034/80 GiB97 %88°698 Wtrain.ipynb +1',
    );
    // An open GPU begins with them, and the clocks.
    expect(card.querySelector('.body')?.firstElementChild?.textContent).toBe(
      '88 °C · 698/700 W · 1755/1980 MHz · GPU 1 · memory 2619 MHz',
    );
  });

  test('shows a badge for each fault, and none for the power cap', () => {
    const monitor = mount();
    expect(text(monitor, '.badge')).toEqual([
      'Xid 63',
      'hot: 88 °C, limit 87 °C',
      'throttled: hardware thermal slowdown, 1755 / 1980 MHz',
    ]);
  });

  test('shows unknown values as N/A, never 0', () => {
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
    expect(text(monitor, '.used, .percent, .heat, .power')).toEqual(Array(4).fill('N/A'));
    expect(one(monitor, '.vitals').textContent).toMatch(/^N\/A · N\/A · /);
    expect(one(monitor, '.gpu').textContent).not.toMatch(/\b0 /);
  });

  test('lists only known readings as details', () => {
    const monitor = mount();
    const [bare, full] = [at(all(monitor, '.gpu'), -1), at(all(monitor, '.gpu'), 1)];
    for (const gpu of [bare, full]) gpu.querySelector<HTMLElement>('.axis > .more')?.click();
    monitor.draw();
    const names = (card: Element): (string | null)[] =>
      [...card.querySelectorAll('dt')].map((node) => node.textContent);
    expect(names(bare)).toEqual(['UUID']);
    expect(names(full)).toContain('PCIe');
    expect(full.querySelector('dl')?.textContent?.replaceAll('\u00a0', ' ')).toContain('gen 5 ×16');
  });

  test('shows problems with cause and cure, and text to type as code', () => {
    const snapshot = fixture();
    snapshot.problems = [
      { code: 'x', cause: 'no driver', cure: 'start it with --gpus all', uuid: null },
    ];
    const monitor = mount(snapshot);
    expect(text(monitor, '.problem')).toEqual(['No driver. Start it with --gpus all.']);
    expect(text(monitor, '.problem code')).toEqual(['--gpus all']);
  });

  test('announces a problem to screen readers once, not each second', () => {
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

  test('shows the doctor’s checks and virtual GPUs if there is no GPU', () => {
    const checkAgain = vi.fn();
    const why = { code: 'library-missing', cause: 'no driver', cure: 'see --doctor', uuid: null };
    const none = { ...fixture(), gpus: [], processes: [], problems: [why] };
    const monitor = mount(none, { doctor: checkAgain });
    expect(one(monitor, '.advice').textContent).toBe('No driver.');
    monitor.set({
      checks: [
        { name: 'driver', ok: false, found: 'none', cure: 'install it' },
        { name: 'torch', ok: true, found: '2.13', cure: '' },
        { name: 'container', ok: null, found: 'no', cure: '' },
      ],
    });
    monitor.draw();
    expect(text(monitor, '.check > [role=img]')).toEqual(['✗', '✓', '·']);
    // The advice is by the first failed check; all checks are folded.
    expect(text(monitor, '.doctor > details:not([open]) > summary')).toEqual(['3 checks']);
    expect(one(monitor, '.doctor').textContent).toContain('%gpus --virtual 2');
    expect(one(monitor, '.advice').textContent).toBe('None. Install it.');
    expect(text(monitor, '.check .cure')).toEqual(['→ install it']);
    expect(text(monitor, '.check.dim b')).toEqual(['container']);
    expect(root(monitor).textContent).not.toContain('--doctor');
    (one(monitor, '.again') as HTMLButtonElement).click();
    expect(checkAgain).toHaveBeenCalledOnce();
    monitor.update(fixture());
    monitor.set({ checks: null });
    monitor.draw();
    expect(one(monitor, '.doctor').hidden).toBe(true);
  });

  test('an offer’s button stays the same element when its label changes', () => {
    const monitor = mount({ ...fixture(), gpus: [], processes: [] });
    const press = vi.fn();
    const offer = { buttons: [{ label: 'in a.ipynb', title: 'it ends', press }], text: '' };
    monitor.set({ offer: { ...offer, busy: false } });
    monitor.draw();
    const button = one(monitor, '.offer button') as HTMLButtonElement;
    button.click();
    expect(press).toHaveBeenCalledOnce();
    monitor.set({ offer: { ...offer, text: 'it runs', busy: true } });
    monitor.draw();
    expect(one(monitor, '.offer button')).toBe(button);
    expect(button.disabled).toBe(true);
    expect(text(monitor, '.offer [role=status]')).toEqual(['it runs']);
  });

  test('says that it looks for GPUs before the first snapshot', () => {
    const monitor = mount(null);
    expect(text(monitor, '.all > p:not([hidden])')).toContain('Looking for GPUs…');
    expect(one(monitor, '[role=status]').textContent).toBe('connecting…');
    monitor.set({ connection: { kind: 'live' } });
    expect(one(monitor, '[role=status]').textContent).toBe('');
  });

  test('shows names as text, whatever is in them', () => {
    const snapshot = fixture();
    const evil = '<img src=x onerror=alert(1)>';
    for (const gpu of snapshot.gpus) gpu.name = evil;
    for (const process of snapshot.processes) process.notebook = process.name = evil;
    snapshot.host.name = evil;
    snapshot.problems = [{ code: evil, cause: evil, cure: evil, uuid: evil }];
    const monitor = mount(snapshot);
    monitor.set({ checks: [{ name: evil, ok: null, found: evil, cure: evil }] });
    monitor.set({ results: [{ id: 'r', title: evil, time: 1, text: evil, bars: [] }] });
    monitor.draw();
    expect(all(monitor, 'img, script')).toEqual([]);
  });

  test('lists results newest first, and keeps their elements', () => {
    const monitor = mount();
    const result = { text: 'text', bars: [] };
    monitor.set({ results: [{ ...result, id: 'a', title: 'older', time: 1 }] });
    const older = one(monitor, '.results details');
    monitor.set({
      results: [
        { ...result, id: 'a', title: 'older', time: 1 },
        { ...result, id: 'b', title: 'newer', time: 2 },
      ],
    });
    expect(text(monitor, '.results summary').map((title) => title.slice(0, 5))).toEqual([
      'newer',
      'older',
    ]);
    expect(at(all(monitor, '.results details'), 1)).toBe(older);
  });

  test('translates every word', () => {
    const said: string[] = [];
    const monitor = new Monitor({
      translate: {
        __: (words) => {
          said.push(words);
          return `«${words}»`;
        },
        _n: (words) => words,
      },
    });
    monitor.update(fixture());
    monitor.draw();
    expect(said).toContain('Utilization');
    expect(text(monitor, '.cap .dim')).toContain('«Utilization»');
  });
});

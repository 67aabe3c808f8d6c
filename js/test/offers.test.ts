import type { ISessionContext } from '@jupyterlab/apputils';
import { Gettext } from '@jupyterlab/translation/lib/gettext.js';
import { beforeEach, expect, it } from 'vitest';
import { type Application, Cells } from '../src/lab/cells.js';
import { Offers } from '../src/lab/no-gpu.js';
import { english, type Offer, type State } from '../src/monitor/shared.js';
import { settled } from './environment.js';

/** A notebook whose kernel answers as a test says. */
class Notebook {
  id = 'book';
  name = 'train.ipynb';
  ready = Promise.resolve();
  sessionContext = this;
  context = { ready: Promise.resolve() };
  content = {
    activeCellIndex: 3,
    model: {
      sharedModel: {
        insertCell: (at: number, { source }: { source: string }) =>
          void this.content.widgets.splice(at, 0, {
            model: { executionCount: null, sharedModel: { source } },
          }),
      },
    },
    widgets: [
      { model: { executionCount: null as number | null, sharedModel: { source: 'x = 1' } } },
    ],
  };
  ran: string[] = [];
  reply: object = { status: 'ok' };
  kernel: Record<string, unknown> | null = {
    status: 'idle',
    requestExecute: ({ code, silent }: { code: string; silent: boolean }) => {
      expect(silent).toBe(true);
      this.ran.push(code);
      const printed = { name: 'stdout', text: 'written there\n' };
      const future = {
        onIOPub: (_: object) => {},
        done: Promise.resolve().then(() => {
          future.onIOPub({ header: { msg_type: 'stream' }, content: printed });
          return { content: this.reply };
        }),
      };
      return future;
    },
  };
  get session() {
    return { kernel: this.kernel };
  }
  get cells() {
    return this.content.widgets.map(({ model }) => model.sharedModel.source);
  }
}

const LINES = '%load_ext gpumagic\n%gpus --virtual 2';
let book: Notebook;
let open: Notebook[];
let shown: Offer;
let notified: string[];
let executed: [string, unknown][];
let answer: boolean;
let specs: object | null;
let offers: Offers;
let cells: Cells;
const here = () => offers.setCurrent(book as unknown as ISessionContext);
const press = async () => {
  shown.buttons[0]?.press();
  await settled();
};

beforeEach(() => {
  book = new Notebook();
  [notified, executed, answer, open] = [[], [], true, [book]];
  specs = {
    default: 'python3',
    kernelspecs: {
      r: { name: 'r', language: 'R' },
      old: { name: 'old', language: 'python' },
      python3: { name: 'python3', language: 'python' },
    },
  };
  const app = {
    commands: {
      hasCommand: () => true,
      execute: (name: string, how: unknown) => {
        executed.push([name, how]);
        return Promise.resolve(name === 'notebook:run-cell-and-select-next' ? answer : book);
      },
    },
    shell: { activateById: () => {}, widgets: () => open },
    serviceManager: {
      kernelspecs: {
        ready: Promise.resolve(),
        get specs() {
          return specs;
        },
      },
    },
  } as unknown as Application;
  const set = ({ offer }: Partial<State>) => {
    if (offer) shown = offer;
  };
  cells = new Cells(app, english);
  offers = new Offers(cells, { set }, (text) => notified.push(text), english);
});

it('runs both lines as the first cell of the current notebook, and says what to type', async () => {
  here();
  expect(shown.buttons[0]?.label).toBe('Use 2 virtual GPUs in train.ipynb');
  shown.buttons[0]?.press();
  expect(shown).toMatchObject({ busy: true, text: 'Making 2 virtual GPUs in train.ipynb…' });
  await settled();
  expect(book.cells).toEqual([LINES, 'x = 1']);
  expect(book.content.activeCellIndex).toBe(0);
  expect(executed).toEqual([['notebook:run-cell-and-select-next', undefined]]);
  expect(shown).toMatchObject({ busy: false, text: '' });
  expect(notified).toEqual([
    'train.ipynb now has 2 virtual GPUs, until its kernel stops. Type %%ongpu 1 at the top of a cell.',
  ]);
  await press();
  expect(book.cells).toEqual([LINES, 'x = 1']);
});

it('JupyterLab’s translation keeps both percent signs', () => {
  const bundle = new Gettext({ domain: 'gpumagic' });
  const said: string[] = [];
  const trans = { __: bundle.__.bind(bundle), _n: bundle._n.bind(bundle) } as typeof english;
  const made = new Offers(cells, { set: () => {} }, (text) => said.push(text), trans);
  made.setCurrent(book as unknown as ISessionContext);
  return made.virtual().then(() => expect(said[0]).toContain('Type %%ongpu 1 at'));
});

it('opens a notebook with a Python kernel if none is open', async () => {
  expect(shown.buttons[0]?.label).toBe('New notebook with 2 virtual GPUs');
  await press();
  expect(executed[0]).toEqual(['notebook:create-new', { kernelName: 'python3' }]);
  expect(book.cells[0]).toBe(LINES);
  specs = { default: 'r', kernelspecs: { r: { name: 'r', language: 'R' } } };
  await press();
  expect(shown.text).toBe('This server has no Python kernel.');
});

it('injects the lines into a console', async () => {
  open = [];
  here();
  await press();
  expect(executed).toEqual([['console:inject', expect.objectContaining({ code: LINES })]]);
});

it('says that the first cell failed', async () => {
  answer = false;
  here();
  await press();
  expect(shown.text).toBe('The first cell of train.ipynb failed; its output says why.');
  expect(notified).toEqual([]);
  await expect(offers.virtual()).rejects.toThrow('failed');
  // Another notebook has no failure.
  offers.setCurrent(null);
  expect(shown.text).toBe('');
});

it('selects the newest cell with a number', async () => {
  book.content.widgets = [7, 9, 7].map((executionCount) => ({
    model: { executionCount, sharedModel: { source: '' } },
  }));
  const context = book as unknown as ISessionContext;
  expect(await cells.show(context, 7)).toBe(true);
  expect(book.content.activeCellIndex).toBe(2);
  expect(await cells.show(context, 8)).toBe(false);
});

it.each([
  ['no kernel', (it: Notebook) => (it.kernel = null), /^train.ipynb has no kernel: start one/],
  [
    'an error',
    (it: Notebook) => (it.reply = { status: 'error', ename: 'E', evalue: 'no disk\nmore' }),
    /^no disk$/,
  ],
  ['an earlier failure', (it: Notebook) => (it.reply = { status: 'aborted' }), /Press again\.$/],
])('says in a line why the settings were not written: %s', async (_, change, line) => {
  change(book);
  here();
  await expect(offers.enable()).rejects.toThrow(line);
  expect(shown.text).toMatch(line);
});

it('writes the settings of the kernel’s profile if a notebook is open', async () => {
  expect(shown.buttons).toHaveLength(1);
  await expect(offers.enable()).rejects.toThrow('Open a notebook first');
  here();
  shown.buttons[1]?.press();
  await settled();
  expect(book.ran).toEqual([expect.stringContaining('loading.enable()')]);
  expect(shown.text).toBe('Written there.');
});

it('runs once if pressed twice', async () => {
  here();
  shown.buttons[0]?.press();
  shown.buttons[0]?.press();
  await settled();
  expect(executed).toHaveLength(1);
});

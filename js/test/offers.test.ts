import type { ISessionContext } from '@jupyterlab/apputils';
import { beforeEach, expect, it } from 'vitest';
import { Offers } from '../src/lab/no-gpu.js';
import { type Application, RunInKernel } from '../src/lab/run-in-kernel.js';
import { english, type Offer } from '../src/monitor/shared.js';
import { settled } from './world.js';

/** A notebook whose kernel answers as a test says. */
class Notebook {
  name = 'train.ipynb';
  ready = Promise.resolve();
  close = () => {};
  disposed = {
    connect: (slot: () => void) => {
      this.close = slot;
    },
  };
  ran: string[] = [];
  reply: object = { status: 'ok' };
  kernel: Record<string, unknown> | null = {
    status: 'idle',
    info: Promise.resolve({ language_info: { name: 'python' } }),
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
}

const LINES = '%load_ext gpumagic\n%gpus --virtual 2';
let book: Notebook;
let shown: Offer;
let told: string[];
let opened: object[];
let specs: object | null;
let offers: Offers;
const here = () => offers.here(book as unknown as ISessionContext);
const press = async () => {
  shown.buttons[0]?.press();
  await settled();
};

beforeEach(() => {
  book = new Notebook();
  told = [];
  opened = [];
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
      execute: (_: string, how: object) => {
        opened.push(how);
        return Promise.resolve({ sessionContext: book });
      },
    },
    serviceManager: {
      kernelspecs: {
        ready: Promise.resolve(),
        get specs() {
          return specs;
        },
      },
    },
  } as unknown as Application;
  const set = ({ offer }: { offer: Offer }) => {
    shown = offer;
  };
  offers = new Offers(new RunInKernel(app, english), set, (text) => told.push(text), english);
});

it('runs both lines in the current notebook, and says so', async () => {
  here();
  expect(shown.buttons[0]?.label).toBe('Use 2 virtual GPUs in train.ipynb');
  shown.buttons[0]?.press();
  expect(shown).toMatchObject({ busy: true, text: 'Making 2 virtual GPUs in train.ipynb…' });
  await settled();
  expect(book.ran).toEqual([LINES]);
  expect(shown).toMatchObject({ busy: false, text: '' });
  expect(told).toEqual([
    'train.ipynb now has 2 virtual GPUs, until its kernel stops. Try %%ongpu 1 on top of a cell.',
  ]);
});

it('opens a notebook with the Python kernel where there is none', async () => {
  expect(shown.buttons[0]?.label).toBe('New notebook with 2 virtual GPUs');
  await press();
  expect(opened).toEqual([{ kernelName: 'python3' }]);
  expect(book.ran).toEqual([LINES]);
  specs = { default: 'r', kernelspecs: { r: { name: 'r', language: 'R' } } };
  await press();
  expect(shown.text).toBe('This server has no Python kernel.');
});

const STANDS_AGAINST: [string, (book: Notebook) => void, RegExp][] = [
  ['no kernel', (it) => (it.kernel = null), /^train.ipynb has no kernel: start one/],
  ['a dead one', (it) => (it.kernel = { ...it.kernel, status: 'dead' }), /is dead: restart it/],
  ['a busy one', (it) => (it.kernel = { ...it.kernel, status: 'busy' }), /is running a cell/],
  [
    'one of another language',
    (it) => {
      const info = Promise.resolve({ language_info: { name: 'R' } });
      it.kernel = { ...it.kernel, info };
    },
    /^The kernel of train.ipynb is R: virtual GPUs need Python\.$/,
  ],
  [
    'one without gpumagic',
    (it) =>
      (it.reply = {
        status: 'error',
        ename: 'ModuleNotFoundError',
        evalue: "No module named 'gpumagic'",
      }),
    /^The kernel of train.ipynb has no gpumagic: run %pip install gpumagic in it\.$/,
  ],
  [
    'what the magic refuses',
    (it) =>
      (it.reply = { status: 'error', ename: 'UsageError', evalue: '%gpus: no torch\nmore of it' }),
    /^%gpus: no torch$/,
  ],
  ['an earlier failure', (it) => (it.reply = { status: 'aborted' }), /Press again\.$/],
];

it.each(STANDS_AGAINST)('says in a line what stands against it: %s', async (_, change, line) => {
  change(book);
  here();
  await press();
  expect(shown.text).toMatch(line);
  expect(shown.busy).toBe(false);
  expect(told).toEqual([]);
  await expect(offers.virtual()).rejects.toThrow(line);
  // Another notebook is another question.
  offers.here(null);
  expect(shown.text).toBe('');
});

it.each([
  ['that it has no kernel yet', (it: Notebook, never: Promise<void>) => (it.ready = never)],
  [
    'that its kernel says nothing',
    (it: Notebook, never: Promise<void>) => (it.kernel = { ...it.kernel, info: never }),
  ],
])('waits no longer for a notebook that is closed while %s', async (_, change) => {
  change(book, new Promise<void>(() => {}));
  here();
  await press();
  expect(shown.busy).toBe(true);
  book.close();
  await settled();
  expect(shown).toMatchObject({ busy: false, text: 'train.ipynb was closed.' });
});

it('writes the settings of the kernel’s profile, where there is a notebook', async () => {
  expect(shown.buttons).toHaveLength(1);
  await expect(offers.enable()).rejects.toThrow('Open a notebook first');
  here();
  shown.buttons[1]?.press();
  await settled();
  expect(book.ran).toEqual([expect.stringContaining('every_notebook.enable()')]);
  expect(shown.text).toBe('Written there.');
});

it('runs once however often it is pressed', async () => {
  here();
  shown.buttons[0]?.press();
  shown.buttons[0]?.press();
  await settled();
  expect(book.ran).toHaveLength(1);
});

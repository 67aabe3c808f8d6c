"""What writes, changes or sends, by every route: after a dry run of it nothing is changed."""

import array
import builtins
import contextvars
import ctypes
import fcntl
import importlib
import importlib.util
import itertools
import mmap
import multiprocessing
import os
import pty
import re
import select
import signal
import socket
import sqlite3
import sys
import termios
import threading
import time
import types
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import ClassVar

import numpy as np
import psutil
import pytest
import torch
import torch._dynamo  # what that sets is its own
from dry_runs import of_cell
from torch import nn

from gpumagic import GpuError, dry_run
from gpumagic.dryrun import confined, follow_code

IMPORTS = (
    "io os sys json csv pickle shutil pathlib tempfile gzip bz2 lzma zipfile tarfile codecs "
    "logging shelve dbm sqlite3 mmap subprocess socket signal ctypes multiprocessing threading "
    "fcntl termios resource time locale asyncio gc decimal random fileinput pty urllib.request "
    "builtins concurrent.futures atexit weakref warnings psutil"
)
# `p` is a folder with files of 4 bytes: a to f, and the folders full (with one file) and empty.
FILES = """
open(p / 'new', 'w').write('x')
open(p / 'a', 'a').write('x')
open(p / 'a', 'r+').write('x')
open(p / 'a', 'wb')
io.FileIO(p / 'a', 'w')
codecs.open(p / 'new', 'w')
os.open(p / 'new', os.O_CREAT | os.O_WRONLY)
os.open(p / 'a', os.O_WRONLY | os.O_TRUNC)
os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=os.open(p, os.O_RDONLY))
os.truncate(p / 'a', 0)
os.remove(p / 'a')
os.unlink(p / 'b')
os.rename(p / 'a', p / 'new')
os.replace(p / 'a', p / 'b')
os.renames(p / 'a', p / 'x' / 'y')
os.mkdir(p / 'new')
os.makedirs(p / 'new' / 'er')
os.rmdir(p / 'empty')
os.removedirs(p / 'empty')
os.link(p / 'a', p / 'new')
os.symlink(p / 'a', p / 'new')
os.mkfifo(p / 'new')
os.mknod(p / 'new')
os.chmod(p / 'a', 0)
os.utime(p / 'a', (0, 0))
os.setxattr(p / 'a', 'user.new', b'x')
os.removexattr(p / 'f', 'user.old')
(p / 'a').write_text('x')
(p / 'a').write_bytes(b'x')
(p / 'new').touch()
(p / 'a').touch()
(p / 'a').unlink()
(p / 'a').rename(p / 'new')
(p / 'new').mkdir()
(p / 'empty').rmdir()
(p / 'new').symlink_to(p / 'a')
(p / 'new').hardlink_to(p / 'a')
(p / 'a').chmod(0)
shutil.copy(p / 'a', p / 'new')
shutil.copyfile(p / 'f', p / 'a')
shutil.copytree(p / 'full', p / 'new')
shutil.copystat(p / 'full', p / 'a')
shutil.move(p / 'a', p / 'new')
shutil.rmtree(p / 'full')
shutil.make_archive(p / 'new', 'tar', p / 'full')
tempfile.NamedTemporaryFile(dir=p, delete=False)
tempfile.mkstemp(dir=p)
tempfile.mkdtemp(dir=p)
[print('x') for _ in fileinput.input(p / 'a', inplace=True)]
gzip.open(p / 'new', 'wb').write(b'x')
bz2.open(p / 'new', 'wb').write(b'x')
lzma.open(p / 'new', 'wb').write(b'x')
zipfile.ZipFile(p / 'new', 'w').close()
tarfile.open(p / 'new', 'w').close()
json.dump({}, open(p / 'new', 'w'))
csv.writer(open(p / 'new', 'w')).writerow([1])
pickle.dump([1], (p / 'new').open('wb'))
shelve.open(str(p / 'new'))
dbm.open(str(p / 'new'), 'c')
logging.FileHandler(p / 'new')
np.save(p / 'new.npy', np.ones(2))
np.savez(p / 'new.npz', np.ones(2))
np.savetxt(p / 'new', np.ones(2))
np.ones(2).tofile(p / 'a')
np.memmap(p / 'a', mode='r+')[0] = 1
np.lib.format.open_memmap(p / 'new', 'w+', shape=(2,))
torch.save(torch.ones(2), p / 'new')
torch.save(nn.Linear(2, 2).state_dict(), p / 'a')
torch._C.PyTorchFileWriter(str(p / 'a'))
torch.from_file(str(p / 'a'), shared=True, size=4, dtype=torch.uint8).fill_(7)
torch.UntypedStorage.from_file(str(p / 'a'), True, 4).fill_(7)
sqlite3.connect(p / 'new').execute('create table t (x)')
database.execute('insert into t values (1)')
libc.open(bytes(p / 'a'), os.O_WRONLY | os.O_TRUNC)
libc.creat(bytes(p / 'new'), 0o600)
libc.unlink(bytes(p / 'a'))
libc.rename(bytes(p / 'a'), bytes(p / 'new'))
libc.mkdir(bytes(p / 'new'), 0o700)
libc.truncate(bytes(p / 'a'), 0)
libc.chmod(bytes(p / 'a'), 0)
libc.utimes(bytes(p / 'a'), None)
libc.setxattr(bytes(p / 'a'), b'user.new', b'x', 1, 0)
libc.link(bytes(p / 'a'), bytes(p / 'new'))
pd.DataFrame({'a': [1]}).to_csv(p / 'a')
pd.DataFrame({'a': [1]}).to_pickle(p / 'a')
pd.DataFrame({'a': [1]}).to_parquet(p / 'a')
"""
OPEN = """
os.write(fd, b'x')
os.pwrite(fd, b'x', 0)
os.ftruncate(fd, 0)
os.posix_fallocate(fd, 0, 4096)
os.fchmod(fd, 0)
os.lseek(fd, 2, os.SEEK_SET)
os.read(fd, 1)
fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
os.sendfile(fd, os.open(p / 'f', os.O_RDONLY), 0, 4)
libc.write(fd, b'x', 1)
libc.fchmod(fd, 0)
mapped[0:1] = b'x'
mmap.mmap(fd, 4)[0:1] = b'x'
os.write(pipe, b'x')
os.set_blocking(pipe, False)
os.write(terminal, b'x')
termios.tcsetattr(terminal, termios.TCSANOW, [0, 0, 0, 0, 0, 0, [b'0'] * 32])
"""
OTHERS = """
subprocess.run(['touch', p / 'new'])
subprocess.Popen(['touch', p / 'new']).wait()
os.system(f'touch {p}/new')
os.popen(f'touch {p}/new').read()
os.spawnlp(os.P_WAIT, 'touch', 'touch', str(p / 'new'))
os.waitpid(os.posix_spawnp('touch', ['touch', str(p / 'new')], os.environ), 0)
os.execlp('touch', 'touch', str(p / 'new'))
libc.system(b'touch %s/new' % bytes(p))
os.fork() or os._exit((p / 'new').write_text('x'))
pty.spawn(['touch', str(p / 'new')])
asyncio.run(asyncio.create_subprocess_exec('touch', str(p / 'new')))
multiprocessing.get_context('fork').Process(target=(p / 'new').touch).start()
concurrent.futures.ProcessPoolExecutor(1).submit(os.mkdir, p / 'new').result()
socket.create_connection(('127.0.0.1', port))
urllib.request.urlopen(f'http://127.0.0.1:{port}', timeout=0.1)
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', datagrams))
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', str(p / 'socket'))
connected.send(b'x')
socket.socket(socket.AF_UNIX).bind(str(p / 'new'))
os.kill(parent, signal.SIGUSR1)
signal.pidfd_send_signal(os.pidfd_open(parent), signal.SIGUSR1)
libc.kill(parent, signal.SIGUSR1)
psutil.Process(parent).send_signal(signal.SIGUSR1)
os.setpriority(os.PRIO_PROCESS, parent, 19)
psutil.Process(parent).nice(19)
os.sched_setaffinity(parent, [min(os.sched_getaffinity(0))])
resource.prlimit(parent, resource.RLIMIT_CORE, (0, 0))
shared.buf[0] = 1
again = SharedMemory(shared.name); again.buf[0] = 1
SharedMemory(shared.name).unlink()
SharedMemory(create=True, size=8)
number.value = 5
event.set()
tensor.add_(1)
"""
HERE = """
config.k = 2
sys.modules['config'].k = 2
del sys.modules['config']
nn.Linear.mark = 1
nn.Linear.forward = None
builtins.new = 1
Box.shared.append(1)
box.value = 2
vars(box).clear()
function.__defaults__ = (1,)
function.__code__ = (lambda: 2).__code__
next(running)
data.append(1)
memoryview(numbers)[0] = 5
values[0] = 5
variable.set(3)
names['new'] = 1
os.environ['GM_NEW'] = '1'
os.chdir('/')
sys.path.append('nowhere')
sys.setrecursionlimit(5000)
sys.stdout = None
"""
# It would be seen later, or not by this process.
LATER = """
lock.acquire()
os.putenv('GM_NEW', '1')
threading.Timer(0, (p / 'new').touch).start()
atexit.register((p / 'new').touch)
weakref.finalize(box, (p / 'new').touch)
libc.write(1, b'x', 1)
print('x'); print('x', file=sys.stderr); sys.__stdout__.write('x')
"""
# The copy itself may not outlive these.
BREAK = """
builtins.len = None
builtins.isinstance = None
sys.settrace(print)
ctypes.memset(id(data), 255, 1)
"""


class Box:
    shared: ClassVar = []

    def __init__(self):
        self.value = 1


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Variables that reach all that a statement may change, and what says how all of it is."""
    for name in "abcdef":
        (tmp_path / name).write_bytes(b"kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"kept")
    (tmp_path / "empty").mkdir()
    os.setxattr(tmp_path / "f", "user.old", b"x")
    monkeypatch.setitem(sys.modules, "config", types.SimpleNamespace(k=1))
    config = sys.modules["config"]
    fd = os.open(tmp_path / "e", os.O_RDWR)
    reader, pipe = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    controller, terminal = pty.openpty()
    mapped = mmap.mmap(os.open(tmp_path / "d", os.O_RDWR), 4)
    database = sqlite3.connect(tmp_path / "database", isolation_level=None)
    database.execute("create table t (x)")
    server, near, far = socket.create_server(("127.0.0.1", 0)), *socket.socketpair()
    udp, unix = (socket.socket(f, socket.SOCK_DGRAM) for f in (socket.AF_INET, socket.AF_UNIX))
    udp.bind(("127.0.0.1", 0))
    unix.bind(str(tmp_path / "socket"))
    shared = SharedMemory(create=True, size=8)
    number, event = multiprocessing.Value("i", 1), multiprocessing.Event()
    tensor, data, numbers, values = (
        torch.zeros(3).share_memory_(),
        bytearray(b"abc"),
        array.array("i", [1]),
        np.ones(3),
    )
    variable, names, box = contextvars.ContextVar("v", default=0), {}, Box()
    lock, running = torch.multiprocessing.Lock(), iter(range(3))
    signals = []
    monkeypatch.setattr(Box, "shared", [])
    before = signal.signal(signal.SIGUSR1, lambda *args: signals.append(args[0]))

    def function(x=0):
        return x

    def look():
        """How everything is now, as something to be compared."""
        parent = psutil.Process(space["parent"])
        ends = [reader, controller, server, far, udp, unix]
        return {
            "files": {str(f): _of_file(f) for f in sorted(tmp_path.rglob("*"))},
            "descriptors": [os.lseek(fd, 0, os.SEEK_CUR), fcntl.fcntl(fd, fcntl.F_GETFL)],
            "pipe": (os.get_blocking(pipe), termios.tcgetattr(terminal)),
            "sent": len(select.select(ends, [], [], 0)[0]),
            "signals": list(signals),
            "parent": (parent.nice(), parent.cpu_affinity(), parent.rlimit(psutil.RLIMIT_CORE)),
            "shared": (bytes(shared.buf), number.value, event.is_set(), tensor.tolist()),
            "segments": sorted(f for f in os.listdir("/dev/shm") if f.startswith(("psm_", "gm"))),
            "module": (
                config.k,
                "config" in sys.modules,
                hasattr(nn.Linear, "mark"),
                hasattr(builtins, "new"),
            ),
            "functions": (nn.Linear.forward, hasattr(nn.Linear, "mark"), len),
            "function": (function.__defaults__, function.__code__),
            "objects": (Box.shared[:], vars(box).copy(), type(box), names.copy(), dict(os.environ)),
            "values": (
                bytes(data),
                numbers.tolist(),
                values.tolist(),
                variable.get(),
                running.__length_hint__(),
            ),
            "process": (os.getcwd(), sys.path[:], sys.getrecursionlimit(), sys.stdout),
        }

    for name in IMPORTS.split():
        importlib.import_module(name)
    modules = {
        name: sys.modules[name] for name in re.findall(r"[\w]+", IMPORTS) if name in sys.modules
    }
    space = {**modules, "p": tmp_path, "libc": ctypes.CDLL(None), "connected": near, "np": np}
    space |= {k: v for k, v in locals().items() if k not in ("monkeypatch", "tmp_path", "modules")}
    space |= {"torch": torch, "nn": nn, "Box": Box, "SharedMemory": SharedMemory, "Path": Path}
    space |= {"port": server.getsockname()[1], "datagrams": udp.getsockname()[1]}
    space |= {"parent": os.getpid(), "__name__": "__main__"}
    yield space
    signal.signal(signal.SIGUSR1, before)
    database.close()
    mapped.close()
    for one in (server, near, far, udp, unix):
        one.close()
    for one in (fd, reader, pipe, controller, terminal):
        os.close(one)
    shared.close()
    with suppress(FileNotFoundError):
        shared.unlink()


def _of_file(path):
    facts = path.lstat()
    found = [facts.st_mode, facts.st_uid, facts.st_nlink, facts.st_mtime_ns, facts.st_size]
    if path.is_symlink() or not path.is_file():
        return found
    return [*found, path.read_bytes(), os.listxattr(path)]


def statements(*tables):
    every = [line for table in tables for line in table.strip().splitlines()]
    here = {n for n in ("pandas", "pyarrow") if importlib.util.find_spec(n)}
    needed = {"to_parquet": {"pandas", "pyarrow"}, "pd.": {"pandas"}}
    return [
        f"import pandas as pd; {line}" if "pd." in line else line
        for line in every
        if all(libraries <= here for words, libraries in needed.items() if words in line)
    ]


def guarded(line):
    return f"try:\n    {line}\nexcept BaseException as error:\n    raised[{line!r}] = error"


def unchanged(world, lines):
    """The dry run of these lines, each going on after the last was refused."""
    code = "\n".join(["raised = {}", *map(guarded, lines)])
    before, children = world["look"](), set(psutil.Process().children(recursive=True))
    try:
        return of_cell(code, world)
    finally:
        after = world["look"]()
        assert {part for part in before if after[part] != before[part]} == set()
        assert set(psutil.Process().children(recursive=True)) <= children


def test_nothing_is_changed_by_any_of_them(world):
    """All in one dry run."""
    lines = statements(FILES, OPEN, OTHERS, HERE, LATER)
    assert len(lines) > 150
    result = unchanged(world, lines)
    assert result.error is None, result


@pytest.mark.parametrize("line", statements(BREAK))
def test_nothing_is_changed_where_the_copy_breaks(world, line):
    with suppress(GpuError):
        unchanged(world, [line])


@pytest.mark.slow
@pytest.mark.parametrize("line", statements(FILES, OPEN, OTHERS, HERE))
def test_each_of_them_is_a_change(world, line):
    """Or the test above would hold for nothing. It is the child of a process that may change."""

    def child(work):
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                os.setpgid(0, 0)
                os._exit(work())
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # a pool's workers outlive who started them
        return os.waitstatus_to_exitcode(status)

    def run():
        with suppress(BaseException):
            exec(line, world)
        return world["look"]() != before

    def stage():
        world["parent"] = os.getpid()
        return child(run) or world["look"]() != before

    before = world["look"]()
    assert child(stage)


ENDLESS = """
while True: pass
time.sleep(1e6)
sum(itertools.count())
(lock.acquire(), lock.acquire())
os.read(pipe, 1)
while True: hide()
signal.signal(signal.SIGALRM, signal.SIG_IGN); time.sleep(1e6)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(1e6)
"""


def test_what_never_ends_stops_at_the_limit_and_says_so(monkeypatch):
    monkeypatch.setattr(follow_code, "_GRACE_S", 0.3)

    def hide():
        with suppress(BaseException):
            time.sleep(1e6)

    space = {"time": time, "itertools": itertools, "os": os, "signal": signal, "hide": hide}
    space |= {"lock": threading.Lock(), "pipe": os.pipe()[0]}
    for line in statements(ENDLESS):
        result = dry_run(lambda line=line: exec(line, space), limit=0.2)
        if "os.read" not in line:  # what was a pipe is empty in the copy
            assert not result.complete, line
            assert result.unknown[-1].reason.startswith("the time limit of 0.2 s"), line


def test_an_unreadable_file_is_the_users_own_error(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0)

    def read():
        if os.getuid() == 0:
            os.setuid(65534)  # who may read all
        return secret.read_text()

    result = dry_run(read)
    assert result.error == f"PermissionError: [Errno 13] Permission denied: '{secret}'"
    assert result.unknown == ()


def test_where_the_kernel_refuses_no_write_the_result_says_so(monkeypatch):
    monkeypatch.setattr(confined, "_no_file_written", lambda libc: False)
    result = dry_run(lambda: 1)
    assert result.complete
    assert "C++ code may write files or send data: no Landlock or no seccomp" in str(result)


def test_the_priority_of_a_users_other_processes_stays():
    result = dry_run(lambda: os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_USER, 0)))
    assert "PermissionError" in str(result)

"""Whose a process is, with real processes: kernels, their children, and what dead ones leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from gpumagic.device import Device
from gpumagic.telemetry import ProcessSample, processes
from gpumagic.telemetry.processes import Kernel, Owners

# Plays a kernel: has children, by fork and by exec, says who they are, and waits.
_KERNEL = """
import os, signal, subprocess, sys, time
def forked():
    pid = os.fork()
    if pid == 0:
        os.close(1)
        time.sleep(300)
    return pid
def started(**options):
    command = ["sh", "-c", "echo here; exec sleep 300"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
    child.stdout.readline()
    return child.pid
def detached():
    # As daemons are made: a session of its own, and then it is not its leader.
    told, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            os.close(1)
            time.sleep(300)
        os.write(tell, b"%d" % pid)
        os._exit(0)
    os.wait()
    return int(os.read(told, 20))
pids = [forked(), started(), started(start_new_session=True), detached()]
pids.append(started(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)))
print(*pids, flush=True)
sys.stdin.read()
"""


class FakeKernel:
    """A process that looks like a kernel in every respect that counts."""

    def __init__(self, connection: Path, env: Mapping[str, str], **options: object) -> None:
        command = [sys.executable, "-S", "-c", _KERNEL, "-f", str(connection)]
        self.process = subprocess.Popen(
            command,
            env={"PATH": os.environ["PATH"], **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=bool(options.get("leads", True)),
            text=True,
        )
        assert self.process.stdout
        self.pid = self.process.pid
        self.children = [int(pid) for pid in self.process.stdout.readline().split()]
        self.forked, self.child, self.daemon, self.detached, self.nohup = self.children

    def die(self) -> None:
        self.process.kill()
        self.process.wait()

    def clean_up(self) -> None:
        self.die()
        for pid in self.children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()


Start = Callable[..., FakeKernel]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[FakeKernel] = []

    def begin(kernel: str = "abc-1", notebook: str = "a.ipynb", **options: object) -> FakeKernel:
        env = {"JPY_PARENT_PID": str(os.getpid()), "JPY_SESSION_NAME": notebook}
        env.update(options.pop("env", {}))  # type: ignore[call-overload]
        made.append(FakeKernel(tmp_path / f"kernel-{kernel}.json", env, **options))
        return made[-1]

    yield begin
    for kernel in made:
        kernel.clean_up()


def one(owners: Owners, pid: int) -> ProcessSample:
    return owners.look_up({pid})[pid]


def test_a_kernel_is_known_by_its_command_line(start: Start) -> None:
    kernel = start()
    owner = one(Owners(), kernel.pid)
    assert (owner.kernel, owner.notebook, owner.child, owner.orphan) == (
        "abc-1",
        "a.ipynb",
        False,
        False,
    )
    assert owner.server is None


def test_children_count_for_their_kernel_however_they_were_made(start: Start) -> None:
    kernel = start()
    for pid in (kernel.forked, kernel.child, kernel.daemon):
        owner = one(Owners(), pid)
        assert (owner.kernel, owner.notebook, owner.child) == ("abc-1", "a.ipynb", True)
        assert not owner.orphan


def test_what_the_server_knows_goes_before_what_the_command_line_says(start: Start) -> None:
    kernel = start()
    told = Kernel(kernel.pid, "id-of-the-server", "renamed.ipynb", 17.0)
    owner = one(Owners(lambda: [told]), kernel.child)
    assert (owner.kernel, owner.notebook) == ("id-of-the-server", "renamed.ipynb")
    assert (owner.idle_since, owner.child) == (17.0, True)


def test_children_of_a_dead_kernel_are_orphans_but_daemons_are_not(start: Start) -> None:
    kernel = start()
    owners = Owners()
    assert not one(owners, kernel.child).orphan
    kernel.die()
    for pid in (kernel.forked, kernel.child):
        owner = one(owners, pid)
        assert owner.orphan, pid
        assert (owner.kernel, owner.notebook) == (None, "a.ipynb")
    assert not one(owners, kernel.daemon).orphan


def test_a_kernel_that_started_anew_does_not_adopt_what_the_old_one_left(start: Start) -> None:
    old = start()
    old.die()
    new = start()
    # The system tells when a process began in hundredths of a second: in the same one it may have.
    while psutil.Process(new.pid).create_time() < psutil.Process(old.child).create_time() + 0.02:
        new.die()
        new = start()
    owners = Owners(lambda: [Kernel(new.pid, "abc-1", "a.ipynb")])
    assert one(owners, old.child).orphan
    assert not one(owners, new.child).orphan


def test_while_a_kernel_lives_that_may_be_its_own_nothing_is_an_orphan(start: Start) -> None:
    # What "!program &" leaves: the shell that led its session is gone, its notebook's kernel not.
    kernel, other = start(), start("abc-2")
    other.die()
    assert not one(Owners(), other.child).orphan
    kernel.die()
    assert one(Owners(), other.child).orphan


def test_a_program_without_a_notebook_is_never_an_orphan(start: Start) -> None:
    kernel = start(env={"JPY_PARENT_PID": "", "JPY_SESSION_NAME": ""})
    kernel.die()
    assert not one(Owners(), kernel.child).orphan


def test_the_children_of_this_process_are_named_so(start: Start) -> None:
    kernel = start(env={"JPY_PARENT_PID": "", "JPY_SESSION_NAME": ""})
    assert "started here" not in (one(Owners(), kernel.pid).name or "")
    with subprocess.Popen(["sh", "-c", "read line; true"], stdin=subprocess.PIPE) as child:
        assert one(Owners(), child.pid).name == "sh started here"
        child.terminate()


def test_a_kernel_that_was_launched_otherwise_is_a_kernel_too(start: Start) -> None:
    kernel = start("v2-42", env={"JPY_PARENT_PID": "", "JPY_SESSION_NAME": ""}, leads=False)
    assert one(Owners(), kernel.pid).kernel == "v2-42"
    assert one(Owners(), kernel.forked).child


def test_the_kernel_of_another_server_names_it(start: Start) -> None:
    kernel = start(env={"JPY_PARENT_PID": "4242424"})
    assert one(Owners(), kernel.pid).server == "process 4242424"


def test_of_another_users_process_nothing_but_the_user(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = start()
    monkeypatch.setattr(os, "getuid", lambda: -7)
    assert one(Owners(), kernel.child) == ProcessSample(
        "", kernel.child, user=psutil.Process().username()
    )


def test_the_numbers_of_gpus_in_another_process(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Device("cuda", None, f"GPU-{n}", n, "H100") for n in range(3)]
    kernel = start(env={"CUDA_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "4"})

    def amd_gpus(env: Mapping[str, str]) -> list[Device]:
        return [Device("cuda", 0, f"GPU-amd{env['HIP_VISIBLE_DEVICES']}")]

    owners, unset = Owners(), start("b")
    monkeypatch.setattr(processes, "physical_gpus", lambda: gpus)
    owners.look_up({kernel.child, unset.child})
    assert owners.ordinals == {kernel.child: {"GPU-2": 0, "GPU-0": 1}, unset.child: {}}
    monkeypatch.setattr(processes, "physical_gpus", list)
    monkeypatch.setattr(processes, "amd_gpus", amd_gpus)
    owners.look_up({kernel.child})
    assert owners.ordinals == {kernel.child: {"GPU-amd4": 0}}


def test_looking_again_reads_no_command_line_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = start()
    owners = Owners()
    first = owners.look_up({kernel.child, kernel.forked})
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: pytest.fail("read again"))
    assert owners.look_up({kernel.child, kernel.forked}) == first


@pytest.fixture
def hangup_heeded() -> Iterator[None]:
    """As without nohup, under which these tests may run: all whom they start would inherit it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_heeded")
def test_what_was_made_to_outlive_its_kernel_is_no_orphan(start: Start) -> None:
    kernel = start()
    owners = Owners()
    # Not among its kernel's processes, and no orphan while that lives.
    detached = one(owners, kernel.detached)
    assert (detached.kernel, detached.orphan) == (None, False)
    kernel.die()
    assert one(owners, kernel.child).orphan
    for pid in (kernel.daemon, kernel.nohup):
        assert not one(owners, pid).orphan, pid


def test_notebooks_are_named_from_the_servers_root(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "root"
    inside = start("abc-1", notebook=str(root / "work" / "a.ipynb"))
    outside = start("abc-2", notebook=str(tmp_path / "b.ipynb"))
    for owners, names in (
        (Owners(root=root), ("work/a.ipynb", str(tmp_path / "b.ipynb"))),
        (Owners(), (str(root / "work" / "a.ipynb"), str(tmp_path / "b.ipynb"))),
    ):
        found = owners.look_up({inside.pid, inside.child, outside.pid})
        assert found[inside.pid].notebook == found[inside.child].notebook == names[0]
        assert found[outside.pid].notebook == names[1]
    inside.die()
    orphan = one(Owners(root=root), inside.child)
    assert (orphan.orphan, orphan.notebook) == (True, "work/a.ipynb")

"""State files of virtual GPUs: what one process writes, another reads; and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumagic.telemetry import state_files
from gpumagic.telemetry.snapshot import Host
from gpumagic.telemetry.state_files import (
    BUSY_NS,
    RESERVED,
    WINDOW_END_NS,
    WINDOW_NS,
    Publisher,
    VirtualFacts,
    read,
)

FACTS = [VirtualFacts(f"GPU-v{n}", "Virtual GPU", 16 * 2**30) for n in range(2)]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(FACTS, tmp_path / "runtime" / "virtual")
    yield made
    made.close()


def whole(publisher: Publisher) -> bytes:
    assert publisher.path is not None
    return publisher.path.read_bytes()


def as_another_reads(content: bytes, folder: Path) -> list[state_files.VirtualState]:
    """Without this process's own memory: from the file alone."""
    path = folder / f"{os.getpid()}.state"
    path.write_bytes(content)
    return state_files.read_file(path)


def test_a_file_with_other_columns_is_ignored(publisher: Publisher, tmp_path: Path) -> None:
    """As an older or newer version writes it, whose numbers would mean something else."""
    assert as_another_reads(whole(publisher), tmp_path)
    assert as_another_reads(whole(publisher) + bytes(8 * len(FACTS)), tmp_path) == []


def test_counters_are_read_as_written(publisher: Publisher, tmp_path: Path) -> None:
    row = publisher.counters[1]
    row[RESERVED] = 6 * 2**30
    row[BUSY_NS], row[WINDOW_END_NS] = WINDOW_NS // 4, time.time_ns()
    for states in (
        read(tmp_path / "runtime" / "virtual"),
        as_another_reads(whole(publisher), tmp_path),
    ):
        assert [state.sample.virtual_ordinal for state in states] == [0, 1]
        assert states[1].pid == os.getpid()
        assert states[1].sample.uuid == FACTS[1].uuid
        assert states[1].sample.memory_used == 6 * 2**30
        assert states[1].sample.utilization == 25.0
        assert (states[0].sample.memory_used, states[0].sample.utilization) == (0, 0.0)


def test_a_window_that_ended_long_ago_is_idleness(publisher: Publisher) -> None:
    row = publisher.counters[0]
    row[BUSY_NS], row[WINDOW_END_NS] = WINDOW_NS, time.time_ns() - 1_600_000_000
    assert publisher.states()[0].sample.utilization == 0.0
    row[WINDOW_END_NS] = time.time_ns() - 1_000_000_000
    assert publisher.states()[0].sample.utilization == 100.0


def test_what_cannot_be_is_bounded(publisher: Publisher) -> None:
    row = publisher.counters[0]
    row[RESERVED] = -5
    row[BUSY_NS], row[WINDOW_END_NS] = 9 * WINDOW_NS, time.time_ns()
    (state, _) = publisher.states()
    assert (state.sample.memory_used, state.sample.utilization) == (0, 100.0)


def test_only_this_user_may_read_them(publisher: Publisher) -> None:
    assert publisher.path is not None
    assert publisher.path.stat().st_mode & 0o077 == 0
    assert publisher.path.parent.stat().st_mode & 0o077 == 0


def test_closing_removes_the_file_and_leaves_the_rows_writable(tmp_path: Path) -> None:
    made = Publisher(FACTS, tmp_path)
    made.close()
    made.counters[0][RESERVED] = 1
    made.close()
    assert list(tmp_path.iterdir()) == []
    assert read(tmp_path) == []


def test_where_no_file_can_be_written_this_process_sees_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = Publisher(FACTS, tmp_path / "file" / "virtual")
    try:
        assert made.path is None
        made.counters[0][RESERVED] = 7
        assert [state.sample.memory_used for state in read(tmp_path / "nowhere")] == [7, 0]
    finally:
        made.close()


def test_another_process_is_seen_until_it_ends(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from gpumagic.telemetry.state_files import *
from gpumagic.telemetry import state_files as virtual
made = virtual.Publisher([virtual.VirtualFacts("GPU-o", "Other", 1)], Path({str(tmp_path)!r}))
made.counters[0][virtual.RESERVED] = 42
print("ready", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        (state,) = read(tmp_path)
        assert (state.pid, state.sample.uuid, state.sample.memory_used) == (other.pid, "GPU-o", 42)
        other.communicate("\n")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_nothing_that_counts(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from gpumagic.telemetry import state_files as virtual
virtual.Publisher([virtual.VirtualFacts("GPU-o", "Other", 1)], Path({str(tmp_path)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert len(list(tmp_path.glob("*.state"))) == 1
    assert read(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_only_waits_to_be_reaped_has_no_gpus(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from gpumagic.telemetry import state_files as virtual
virtual.Publisher([virtual.VirtualFacts("GPU-o", "Other", 1)], Path({str(tmp_path)!r}))
os._exit(0)
"""
    other = subprocess.Popen([sys.executable, "-c", program])
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert psutil.Process(other.pid).status() == psutil.STATUS_ZOMBIE
        assert len(list(tmp_path.glob("*.state"))) == 1
        assert read(tmp_path) == []
    finally:
        other.wait()


def test_a_recycled_pid_is_another_process(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = whole(publisher)
    assert as_another_reads(content, tmp_path)
    began = psutil.Process().create_time()
    monkeypatch.setattr(state_files, "started", lambda pid: began + 10)
    assert as_another_reads(content, tmp_path) == []
    assert not (tmp_path / f"{os.getpid()}.state").exists()


def test_a_file_under_another_name_is_not_its_process(publisher: Publisher, tmp_path: Path) -> None:
    path = tmp_path / "1.state"
    path.write_bytes(whole(publisher))
    assert state_files.read_file(path) == []
    assert path.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_leaves_file_and_numbers_to_the_parent(tmp_path: Path) -> None:
    # In a program of its own: a fork of the test runner would carry its threads along.
    program = f"""
import os
from pathlib import Path
from gpumagic.telemetry import state_files as virtual
folder = Path({str(tmp_path)!r})
made = virtual.Publisher([virtual.VirtualFacts("GPU-o", "Own", 1)], folder)
made.counters[0][virtual.RESERVED] = 1
if os.fork() == 0:
    made.counters[0][virtual.RESERVED] = 99
    seen = virtual.read(folder)
    made.close()
    os._exit(0 if [(s.pid, s.sample.memory_used) for s in seen] == [(os.getppid(), 1)] else 1)
code = os.waitstatus_to_exitcode(os.wait()[1])
print(code, made.counters[0][virtual.RESERVED], made.path.exists())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "1", "True"]


@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_corrupt_file_is_ignored_or_says_only_what_it_may(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("state")
    made = Publisher(FACTS, folder)
    content = bytearray(whole(made))
    made.close()
    match data.draw(st.sampled_from(["cut", "flip", "noise"])):
        case "cut":
            content = content[: data.draw(st.integers(0, len(content) - 1))]
        case "flip":
            # In what is written, not in the padding behind it.
            for _ in range(data.draw(st.integers(1, 5))):
                content[data.draw(st.integers(0, 300))] = data.draw(st.integers(0, 255))
        case "noise":
            content = bytearray(data.draw(st.binary(max_size=400)))
    for state in as_another_reads(bytes(content), folder):
        assert state.pid == os.getpid()
        assert state.sample.memory_used >= 0
        assert 0 <= state.sample.utilization <= 100


def test_a_file_cut_short_is_ignored(publisher: Publisher, tmp_path: Path) -> None:
    content = whole(publisher)
    for length in (0, 7, 16, 100, len(content) - 1):
        assert as_another_reads(content[:length], tmp_path) == []


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUMAGIC_RUNTIME_DIR", str(tmp_path))
    assert state_files.state_folder() == tmp_path / "virtual"
    monkeypatch.delenv("GPUMAGIC_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert state_files.state_folder().name == "virtual"


@pytest.fixture(params=["a name too long", "no permission"])
def unreachable(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Path]:
    """A runtime directory below a folder that this user may not enter."""
    shut = tmp_path / ("x" * 300 if "long" in request.param else "shut")
    monkeypatch.setenv("GPUMAGIC_RUNTIME_DIR", str(shut / "runtime"))
    if "long" in request.param:
        yield shut
        return
    shut.mkdir(mode=0)
    user = os.geteuid()
    if user == 0:  # every folder is open to root
        os.seteuid(65534)
    yield shut
    os.seteuid(user)
    shut.chmod(0o700)


def test_a_folder_that_cannot_be_entered_hides_only_other_processes(unreachable: Path) -> None:
    made = Publisher(FACTS)
    try:
        assert made.path is None
        source = state_files.VirtualSource()
        assert [gpu.uuid for gpu in source.gpus(Host())] == ["GPU-v0", "GPU-v1"]
        assert source.problems() == []
    finally:
        made.close()

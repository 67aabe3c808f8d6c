"""``gpumagic top`` in a real terminal, with the stand-in for NVIDIA's library."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from gpumagic import cli
from gpumagic.display.table import width
from gpumagic.errors import GpuError
from gpumagic.gputable.top import top

ROOT = Path(__file__).parents[1]
CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>78M]")


class Vt100:
    """The text on the screen of a VT100, as far as curses uses one."""

    def __init__(self, height: int, columns: int) -> None:
        self.rows = [[" "] * columns for _ in range(height)]
        self.y = self.x = 0
        self.region = (0, height - 1)  # the lines that scroll
        self.wrapped = False  # whether a line was too long, since the screen was last erased

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if match := CONTROL.match(text, at):
                self._control([int(n) for n in re.findall(r"\d+", match[1] or "")], match[2])
                at = match.end()
                if match[0] == "\x1bM":
                    self._line(self.region[0], self.region[1], -1)
                continue
            char, at = text[at], at + 1
            if char == "\r":
                self.x = 0
            elif char == "\n":
                self._line(self.region[1], self.region[0], 1)
            elif char == "\b":
                self.x -= 1
            elif char >= " ":
                # Until the program knows a new size, it writes to the old one.
                self.wrapped |= self.x >= len(self.rows[0])
                if self.x < len(self.rows[0]):
                    self.rows[self.y][self.x] = char
                self.x += 1

    def _line(self, edge: int, other: int, step: int) -> None:
        """Go a line up or down; at the edge of the region, scroll."""
        if self.y >= edge if step > 0 else self.y <= edge:
            del self.rows[other]
            self.rows.insert(edge, [" "] * len(self.rows[0]))
        else:
            self.y += step

    def _control(self, numbers: list[int], letter: str | None) -> None:
        last = len(self.rows) - 1
        count = numbers[0] if numbers else 1
        if letter == "H":
            self.y, self.x = ([n - 1 for n in numbers] or [0, 0])[:2]
        elif letter == "C":
            self.x += count
        elif letter == "D":
            self.x -= count
        elif letter == "A":
            self.y -= count
        elif letter == "B":
            self.y += count
        elif letter in ("J", "K"):
            erased = range(self.x) if numbers == [1] else range(self.x, len(self.rows[0]))
            for x in erased:
                self.rows[self.y][x] = " "
            for row in self.rows[self.y + 1 :] if letter == "J" else ():
                row[:] = " " * len(row)
            self.wrapped &= letter == "K"
        elif letter == "r":
            self.region = (numbers[0] - 1, min(numbers[1] - 1, last)) if numbers else (0, last)
        else:
            assert letter in ("m", "h", "l", None), letter
        self.y = min(max(self.y, 0), last)
        self.x = max(self.x, 0)

    def __str__(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self.rows)


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, env: dict[str, str], height: int = 24, columns: int = 80) -> None:
        self._master, slave = pty.openpty()
        self.resize(height, columns)
        self.before = termios.tcgetattr(slave)
        command = [sys.executable, "-m", "gpumagic", "top", "--period", "0.25"]
        pipes = {"stdin": slave, "stdout": slave, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(
            command, env=env, cwd=ROOT, start_new_session=True, preexec_fn=_control, **pipes
        )
        self._slave = slave
        self.sent = ""

    def resize(self, height: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("4H", height, columns, 0, 0))
        self.screen = Vt100(height, columns)

    def read(self, seconds: float = 0.05) -> str:
        raw = b""
        while select.select([self._master], [], [], seconds)[0]:
            raw += os.read(self._master, 65536)
        text = raw.decode(errors="replace")
        self.sent += text
        self.screen.feed(text)
        return text

    def wait(self, words: str, *, gone: str = "\0") -> str:
        """The screen, once it has these words."""
        end = time.monotonic() + 30
        while self.screen.wrapped or words not in str(self.screen) or gone in str(self.screen):
            assert time.monotonic() < end, f"{self.screen}\n{self.process.poll()}"
            self.read()
        return str(self.screen)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self) -> tuple[int, str]:
        """The status and the errors, once it has ended; the terminal is as it was."""
        _, errors = self.process.communicate(timeout=30)
        self.read()
        assert termios.tcgetattr(self._slave) == self.before
        return self.process.returncode, errors.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._master)
        os.close(self._slave)


def _control() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = ROOT / "tests" / "stand_in" / "nvml.c"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture
def kernel():
    """A process that has a notebook."""
    env = {**os.environ, "JPY_SESSION_NAME": "train.ipynb"}
    with subprocess.Popen(["sleep", "600"], env=env) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def env(driver, kernel, tmp_path):
    machine = tmp_path / "machine"
    name = "gpu.*.name=NVIDIA RTX 6000 Ada Generation\n"
    machine.write_text(f"gpus=2\n{name}gpu.0.compute={kernel}:{2**30},1:{3 * 2**29}\n")
    return {
        **os.environ,
        "STAND_IN_NVML": str(machine),
        "LD_LIBRARY_PATH": str(driver.parent),
        "GPUMAGIC_RUNTIME_DIR": str(tmp_path / "runtime"),
        "TERM": "vt100",
        "COLUMNS": "80",
        "LC_ALL": "C.UTF-8",
    }


@pytest.fixture
def terminal(env):
    made = Terminal(env)
    yield made
    made.close()


def test_it_shows_the_table_with_notebooks_names_in_80_columns_until_q(terminal, kernel):
    shown = terminal.wait("train.ipynb")
    assert re.search(r"^cuda:0 +RTX 6000 .*1\.0 GiB|^train.ipynb +cuda:0 1\.0 GiB", shown, re.M)
    assert "q quit" in shown.splitlines()[-1]
    assert all(width(line) <= 80 for line in shown.splitlines())
    assert "PID" not in shown
    terminal.type("p")
    assert re.search(rf"^train\.ipynb .* {kernel} ", terminal.wait("list: processes"), re.M)
    terminal.type("q")
    assert terminal.end() == (0, "")


def test_s_sorts_by_the_next_column(terminal):
    by_memory = terminal.wait("sort: memory").splitlines()
    shown = terminal.wait("train.ipynb")
    by_memory = shown.splitlines()
    held = [line.split()[0] for line in by_memory if "cuda:0 1." in line and "0 / " not in line]
    terminal.type("sss")
    shown = terminal.wait("sort: PID").splitlines()
    by_pid = [line.split()[0] for line in shown if "cuda:0 1." in line and "0 / " not in line]
    assert len(held) >= 2
    assert held.index("train.ipynb") == 1, held
    assert by_pid.index("train.ipynb") == 1, by_pid
    terminal.type("ss")
    terminal.wait("sort: utilization")


def test_nothing_flickers_and_what_has_not_changed_is_not_sent_again(terminal):
    terminal.wait("train.ipynb")
    first = len(terminal.sent)
    terminal.read(0.6)
    time.sleep(1)
    terminal.read()
    later = terminal.sent[first:]
    for part in ("\x1b[2J", "\x1b[J", "train.ipynb", "RTX 6000", "q quit"):
        assert part in terminal.sent[:first] or part.startswith("\x1b")
        assert part not in later


def test_it_follows_the_size_and_scrolls_what_does_not_fit(terminal):
    terminal.wait("train.ipynb")
    terminal.resize(6, 60)
    shown = terminal.wait("q quit")
    assert "train.ipynb" not in shown
    assert len(shown.splitlines()[-1]) < 60
    terminal.type("\x1bOB" * 24)  # the arrow down of a VT100
    terminal.wait("train.ipynb")
    terminal.type("\x1bOA" * 24)
    terminal.wait("cuda:0", gone="train.ipynb")
    terminal.resize(40, 140)
    terminal.wait("RTX 6000 Ada Generation")


def test_ctrl_c_ends_it_and_restores_the_terminal(terminal):
    terminal.wait("train.ipynb")
    terminal.type("\x03")
    assert terminal.end() == (0, "")


def test_a_driver_that_stalls_delays_no_key(terminal, env):
    terminal.wait("train.ipynb")
    with open(env["STAND_IN_NVML"], "a") as file:
        file.write("stall.*=60\n")
    terminal.wait("has not answered")
    began = time.monotonic()
    terminal.type("q")
    assert terminal.end() == (0, "")
    assert time.monotonic() - began < 5


def test_without_a_terminal_it_says_what_to_type(capsys):
    with pytest.raises(GpuError, match="needs a terminal; type gpumagic snapshot --watch 2"):
        top()
    assert cli.main(["top"]) == 2
    assert capsys.readouterr().err.startswith("gpumagic: top needs a terminal")


def test_a_terminal_that_is_unknown_is_one_line(env):
    terminal = Terminal({**env, "TERM": "no-such-terminal"})
    try:
        status, errors = terminal.end()
    finally:
        terminal.close()
    assert status == 2
    assert "this terminal cannot be used" in errors


def test_it_starts_where_the_locale_is_not_installed(env):
    terminal = Terminal({**env, "LC_ALL": "", "LC_CTYPE": "", "LANG": "xx_YY.UTF-8"})
    try:
        terminal.wait("train.ipynb")
        terminal.type("q")
        assert terminal.end() == (0, "")
    finally:
        terminal.close()


def test_snapshots_again_and_again_until_ctrl_c(env, kernel):
    command = [sys.executable, "-m", "gpumagic", "snapshot", "--watch", "0.1", "--json"]
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        taken = [json.loads(program.stdout.readline()) for _ in range(3)]
        program.send_signal(signal.SIGINT)
        assert program.wait(timeout=30) == 0
    assert taken[0]["time"] < taken[1]["time"] < taken[2]["time"]
    assert kernel in [process["pid"] for process in taken[0]["processes"]]


def test_a_line_for_each_process_and_a_reader_that_ends(env, kernel):
    command = f"{sys.executable} -m gpumagic snapshot --processes --watch 0.1 | head -n 30"
    done = subprocess.run(
        command, shell=True, env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert re.search(rf"^train\.ipynb .* {kernel} ", done.stdout, re.M)
    assert done.stdout.count("train.ipynb") >= 2


def test_a_pause_must_be_one(capsys):
    with pytest.raises(SystemExit):
        cli.main(["snapshot", "--watch", "0"])
    assert "type --watch 2" in capsys.readouterr().err

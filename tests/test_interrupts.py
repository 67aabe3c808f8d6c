"""Ctrl-C works in the tests wherever they are run, also in a shell's background."""

import os
import signal
import subprocess
import sys
from pathlib import Path

HANDLED = "signal.getsignal(signal.SIGINT) is signal.default_int_handler"


def test_sigint_interrupts_here_and_in_what_a_test_starts():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    check = f"import signal, sys; sys.exit(not ({HANDLED}))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_it_does_too_where_the_shell_ignores_it():
    """As under `nohup … &`, whose children inherit that SIGINT is ignored."""
    test = (
        f"{Path(__file__).name}::{test_sigint_interrupts_here_and_in_what_a_test_starts.__name__}"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", test]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr

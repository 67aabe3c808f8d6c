"""Bound what ranks print where no cell shows it."""

import os

from gpumagic.cluster import output


def test_a_log_that_has_become_large_is_emptied_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "MOST_LOGGED", 2**16)
    log = tmp_path / "log"
    before = os.dup(1)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.dup2(file, 1)
        os.write(1, b"x" * 2**10)
        output.bound_logs()
        assert log.stat().st_size == 2**10
        os.write(1, b"x" * 2**18)
        output.bound_logs()
        os.write(1, b"end")
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(file)
    assert log.read_text() == "end"

"""The command line."""

from dataclasses import replace

import pytest
from snapshots import snapshot_in

import gpumagic
from gpumagic import cli, virtual
from gpumagic.telemetry import collect
from gpumagic.telemetry.snapshot import Problem


def test_snapshot_as_json_and_as_a_table(capsys, gpus):
    assert cli.main(["snapshot", "--json"]) == 0
    snapshot = snapshot_in(capsys.readouterr().out)
    assert [g.virtual for g in snapshot.gpus] == [True, True]
    assert cli.main(["snapshot"]) == 0
    assert "cuda:1" in capsys.readouterr().out


def test_a_shell_is_told_a_shells_command(capsys, monkeypatch):
    none = [Problem("no-gpu", "no driver finds a GPU on this machine", "run %gpus --doctor")]
    empty = replace(gpumagic.snapshot(), gpus=(), processes=(), problems=tuple(none))
    monkeypatch.setattr(collect, "snapshot", lambda: empty)
    assert cli.main(["snapshot"]) == 0
    assert "run gpumagic doctor." in capsys.readouterr().out


def test_the_doctor_fails_where_something_is_wrong(capsys):
    status = cli.main(["doctor"])
    shown = capsys.readouterr().out
    assert ("✗" in shown) == bool(status)
    assert "torch" in shown


def test_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"gpumagic {gpumagic.__version__}\n"


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit):
        cli.main([])
    assert "doctor" in capsys.readouterr().err
    assert not virtual.enabled()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--verison", "unexpected --verison; did you mean --version?"),
        ("snapshot --jsno", "unexpected --jsno; did you mean --json?"),
        ("--x", "unexpected --x; type gpumagic --help"),
        ("", "a command is needed; type gpumagic --help"),
    ],
)
def test_an_unknown_option_is_named_before_a_missing_command(capsys, typed, said):
    with pytest.raises(SystemExit) as end:
        cli.main(typed.split())
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_wrong_period_is_named_as_seconds(capsys):
    with pytest.raises(SystemExit):
        cli.main(["snapshot", "--watch", "x"])
    assert "invalid seconds value: 'x'" in capsys.readouterr().err

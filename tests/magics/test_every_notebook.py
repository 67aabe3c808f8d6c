"""`gpumagic enable`: the first magic of a notebook loads the extension; `disable` takes it back."""

import json

import pytest
from kernels import Kernel, text

from gpumagic import cli
from gpumagic.magics import loading


@pytest.fixture
def profile(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    return tmp_path / "profile_default"


def written(profile):
    return json.loads((profile / "ipython_config.json").read_text())


def test_what_others_wrote_stays(profile, capsys):
    profile.mkdir()
    theirs = {
        "MagicsManager": {"lazy_magics": {"theirs": "module"}},
        "TerminalIPythonApp": {"a": 1},
    }
    (profile / "ipython_config.json").write_text(json.dumps(theirs))
    assert cli.main(["enable"]) == 0
    assert written(profile)["MagicsManager"]["lazy_magics"] == {
        "theirs": "module",
        **dict.fromkeys(
            (
                "gpucluster",
                "gpudiff",
                "gpufit",
                "gpufree",
                "gpumem",
                "gpus",
                "gputime",
                "gpuwatch",
                "ongpu",
            ),
            "gpumagic",
        ),
    }
    assert str(profile) in capsys.readouterr().out
    assert cli.main(["enable"]) == 0
    assert cli.main(["disable"]) == 0
    assert written(profile) == theirs
    assert cli.main(["disable"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_what_it_cannot_change_is_one_line(profile, capsys):
    profile.mkdir()
    (profile / "ipython_config.json").write_text("{")
    assert cli.main(["enable"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "ipython_config.json cannot be changed" in said
    assert (profile / "ipython_config.json").read_text() == "{"


def test_a_cell_that_awaits_and_loads_it_is_to_be_run_again(empty_shell):
    empty_shell.ip.magics_manager.lazy_magics["ongpu"] = "gpumagic"
    cell = "%%ongpu cpu\nimport asyncio, torch\nawait asyncio.sleep(0)\ntorch.ones(2)"
    assert empty_shell.run(cell).text == (
        "UsageError: %%ongpu: a cell with await must begin with %%ongpu; if it does, run it again\n"
    )
    assert "cpu · " in empty_shell.run(cell).text


def test_the_first_placed_cell_of_a_kernel_is_as_any_other(profile):
    loading.enable()
    kernel = Kernel(IPYTHONDIR=str(profile.parent), GPUMAGIC_VIRTUAL="2")
    try:
        _, reply = kernel.run("import sys\nassert 'gpumagic' not in sys.modules")
        assert reply["status"] == "ok", reply
        found, reply = kernel.run("%%ongpu 1\nimport torch\nx = torch.ones(2)\nx.device")
        assert reply["status"] == "ok", reply
        assert "device(type='cuda', index=1)" in text(found)
        assert "cuda:1 (virtual)" in text(found)
    finally:
        kernel.stop()

"""A machine's Chromium is found wherever it is, or the way to one is told."""

import os

import chromium
import pytest


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without any; the value makes an executable that succeeds, or does not."""
    monkeypatch.delenv("GPUMAGIC_CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "browsers"))

    def make(path, works=True):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\nexit {0 if works else 1}\n")
        file.chmod(0o755)
        return file

    return make


def test_the_system_s_own_comes_first(machine):
    playwrights = machine("browsers/chromium-1200/chrome-linux64/chrome")
    assert chromium.find() == playwrights
    system = machine("bin/google-chrome")
    assert chromium.find() == system


def test_one_that_does_not_start_is_none(machine):
    machine("bin/chromium-browser", works=False)
    assert chromium.find() is None
    chrome = machine("browsers/chromium-99/chrome-linux/chrome")
    assert chromium.find() == chrome


def test_one_can_be_named(machine, monkeypatch):
    machine("bin/chromium")
    named = machine("elsewhere/my-chrome")
    monkeypatch.setenv("GPUMAGIC_CHROMIUM", str(named))
    assert chromium.find() == named
    monkeypatch.setenv("GPUMAGIC_CHROMIUM", str(named.parent / "none"))
    assert chromium.find() is None


@pytest.fixture
def apt(tmp_path, machine, monkeypatch):
    """An apt-get that writes down what it is asked, and does as the test says."""
    asked = tmp_path / "asked"

    def make(brings=True, root=True):
        machine("bin/apt-get").write_text(
            f'#!/bin/sh\nPATH=/usr/bin:/bin\necho "$*" >> {asked}\n'
            f'case "$*" in *install*) '
            + (f"cp {machine('made/chromium')} {tmp_path}/bin/" if brings else "exit 100")
            + ";; esac\n"
        )
        monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
        return lambda: asked.read_text().splitlines() if asked.exists() else []

    return make


def test_root_gets_one_from_apt(apt, tmp_path, capsys):
    asked = apt()
    assert chromium.main(["--install"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "bin/chromium")
    assert asked() == [
        "--quiet update",
        "--quiet install --yes --no-install-recommends chromium",
    ]
    # It is there now.
    assert chromium.main(["--install"]) == 0
    assert len(asked()) == 2


def test_where_apt_brings_none_it_says_what_to_type(apt, capsys):
    asked = apt(brings=False)
    assert chromium.main(["--install"]) == 1
    assert "playwright install" in capsys.readouterr().err
    assert len(asked()) == 2


def test_who_is_not_root_is_told_what_to_type_and_nothing_is_tried(apt, capsys):
    asked = apt(root=False)
    assert chromium.main(["--install"]) == 1
    assert "sudo apt-get install chromium" in capsys.readouterr().err
    assert asked() == []


def test_without_asking_nothing_is_installed(apt):
    asked = apt()
    assert chromium.main([]) == 1
    assert asked() == []


def test_where_there_is_none_it_says_what_to_type(machine, monkeypatch, capsys):
    # Not root, or no apt: nothing is installed.
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert chromium.main(["--install"]) == 1
    said = capsys.readouterr()
    assert "apt-get install chromium" in said.err
    assert "playwright install" in said.err
    path = machine("bin/chromium")
    assert chromium.main([]) == 0
    assert capsys.readouterr().out.strip() == str(path)

"""The pages' code runs as pasted, from an empty notebook, and their links lead somewhere."""

import ast
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pages
import pytest

import gpumagic
from gpumagic import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Needs a Jupyter server: tests/server/test_http_page.py.
SERVED = "http.md"
RUN = [page for page in pages.PAGES if page.name != SERVED]
LINKED = [*pages.PAGES, pages.ROOT / "CONTRIBUTING.md", pages.ROOT / "CHANGELOG.md"]
RUN_BY_CI = [*(pages.ROOT / ".github" / "workflows").glob("*.yml"), pages.ROOT / ".ci" / "run"]
HTML_LINK = re.compile(r'(?:src|srcset|href)="([^"]+)"')
ALONE = "GPUMAGIC_TESTS_PAGE_ALONE"
# What a shell block may call, beside what is checked below.
TOOLS = {"docker", "curl", ".venv/bin/pytest"}


@pytest.mark.filterwarnings("ignore::gpumagic.CrossDeviceWarning")
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(page, empty_shell, as_in_a_notebook, tmp_path, monkeypatch):
    uses_jax = re.search(r"^import .*\bjax\b", page.read_text(encoding="utf-8"), re.M)
    if uses_jax and ALONE not in os.environ:
        _run_alone(page)
        return
    from gpumagic import virtual

    monkeypatch.chdir(tmp_path)
    _stop_cluster()  # that of other tests
    try:
        pages.run(page, empty_shell, tmp_path)
    finally:
        _stop_cluster()
        virtual.disable()


def _run_alone(page):
    """Run a page in a process of its own: JAX starts threads, beside which no test may fork."""
    test = f"{__file__}::test_a_page_runs_from_top_to_bottom[{page.name}]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    env = os.environ | {ALONE: "1"}
    ran = subprocess.run([*command, test], capture_output=True, text=True, check=False, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def _stop_cluster():
    from gpumagic.cluster import gpu_cluster

    if gpu_cluster.is_running():
        gpu_cluster.current().stop()


def test_a_page_that_shows_something_else_is_found(empty_shell, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(12, 'ms')\n```\n\n```text\n7 ms\n```\n")
    pages.run(page, empty_shell, tmp_path)
    for wrong in ("7 min", "7 ms\n7 ms", "NameError: ms"):
        page.write_text(f"```python\nprint(12, 'ms')\n```\n\n```text\n{wrong}\n```\n")
        with pytest.raises(AssertionError, match=r"page.md:1"):
            pages.run(page, empty_shell, tmp_path)
    page.write_text("```python\n1 / 0\n```\n")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        pages.run(page, empty_shell, tmp_path)


def extras():
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def made():
    """The targets of the Makefile."""
    return set(re.findall(r"^([\w-]+):", (pages.ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("file", RUN_BY_CI, ids=lambda file: file.name)
def test_ci_makes_targets_that_there_are(file):
    text = file.read_text()
    lines = re.findall(r"^(?: *- run: )?make (.*)$", text, re.M)
    words = [word for line in lines for word in line.split() if re.fullmatch(r"\w[\w-]*", word)]
    named = {*words, *re.findall(r"\btarget: ([\w-]+)", text)}
    assert lines
    assert named
    assert named <= made()


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_a_shell_block_names_what_there_is(page):
    targets = made()
    assert set(re.findall(r"`make ([\w-]+)", page.read_text())) <= targets
    for block in pages.blocks(page):
        for line in block.code.splitlines() if block.language == "bash" else ():
            words = shlex.split(line, comments=True)
            # What is set for the command alone stands before it.
            tool, *words = itertools.dropwhile(lambda word: "=" in word, words)
            if tool == "gpumagic":
                with pytest.raises(SystemExit) as end:
                    cli.main([*words, "--help"])
                assert end.value.code == 0, f"{block.place}: {line}"
            elif tool == "make":
                assert set(words) <= targets, f"{block.place}: {line}"
            elif tool == "pip":
                named = re.search(r"gpumagic\[([\w,]+)\]", line)
                assert not named or set(named[1].split(",")) <= extras(), f"{block.place}: {line}"
            else:
                assert tool in TOOLS, f"{block.place}: {line}"


def anchors(page):
    """The headings as GitHub links to them."""
    found = pages.tokens(page)
    titles = (found[n + 1].content for n, one in enumerate(found) if one.type == "heading_open")
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page):
    for token in pages.tokens(page):
        for one in token.children or ():
            if one.type == "link_open":
                yield str(one.attrs["href"])
            elif one.type == "html_inline":
                yield from HTML_LINK.findall(one.content)
        if token.type == "html_block":
            yield from HTML_LINK.findall(token.content)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_no_link_is_dead(page):
    for link in links(page):
        if link.startswith("https://"):
            continue
        path, _, anchor = unquote(link).partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {link}"


def test_every_page_is_in_the_readme_and_on_the_site():
    from_readme = {Path(link).name for link in links(pages.PAGES[0]) if link.endswith(".md")}
    conf = ast.parse((pages.ROOT / "docs" / "conf.py").read_text())
    (site,) = (
        ast.literal_eval(line.value)
        for line in conf.body
        if isinstance(line, ast.Assign) and getattr(line.targets[0], "id", "") == "SECTIONS"
    )
    names = {page.stem for page in pages.PAGES[1:]}
    there = " ".join(site.values()).split()
    notebooks = {path.stem for path in (pages.ROOT / "examples").glob("*.ipynb")}
    assert names | {"library"} == {p.removeprefix("docs/") for p in there if p.startswith("docs/")}
    assert notebooks == {p.removeprefix("examples/") for p in there if p.startswith("examples/")}
    assert {f"{name}.md" for name in names} <= from_readme


def test_every_public_name_is_on_the_library_s_page():
    text = (pages.ROOT / "docs" / "library.rst").read_text()
    assert [
        name for name in gpumagic.__all__ if not re.search(rf":: .*\b{name}$", text, re.M)
    ] == []


def test_the_readme_is_short_and_says_what_is_not_known():
    text = pages.PAGES[0].read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 200
    assert any("Not yet tested on a real GPU" in line for line in lines[:15])

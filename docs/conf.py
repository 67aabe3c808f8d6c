"""Build the site from README.md and docs/*.md, which are also read as they are: `make docs`."""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
PAGES = (
    "magics between-devices memory dry-runs timing many frameworks monitor vendors http"
    " virtual-gpus containers limits architecture"
)

STAND_IN = "tests/stand_in/cuda/README"

project = "gpumagic"
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", f"{STAND_IN}.md"]
extensions = ["myst_parser", "sphinx_copybutton", "sphinxcontrib.mermaid"]
myst_fence_as_directive = ["mermaid"]
# Links to a heading, as GitHub has them.
myst_heading_anchors = 3
nitpicky = True
# A magic is no Python, and is highlighted as if it were.
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "furo"
html_title = "gpumagic"
html_copy_source = False


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """On the site, the README's side has all pages; elsewhere it is a plain page."""
    if page == root_doc:
        pages = [*(f"docs/{name}" for name in PAGES.split()), "CONTRIBUTING", "CHANGELOG", STAND_IN]
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", "", *pages, "```", ""])


def finish(app: Sphinx, error: Exception | None) -> None:
    """Give the site its pictures, which stand in HTML, and its front page."""
    if error is None:
        shutil.copytree(
            ROOT / "docs" / "images", app.outdir / "docs" / "images", dirs_exist_ok=True
        )
        shutil.copyfile(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("build-finished", finish)

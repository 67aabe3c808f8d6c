"""Build the site from README.md and docs/*.md, which are also read as they are: `make docs`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
SECTIONS = {
    "Tutorial": "examples/quickstart examples/tour examples/d2l_gpus examples/d2l_gpus_jax"
    " examples/d2l_gpus_tensorflow",
    "How-to": "docs/between-devices docs/memory docs/dry-runs docs/timing docs/many"
    " docs/frameworks docs/monitor docs/testing docs/containers",
    "Notebooks": "examples/between_devices examples/memory examples/timing"
    " examples/sentence_encoder examples/prompts_on_two_gpus examples/cluster",
    "Reference": "docs/magics docs/library docs/http docs/vendors docs/limits CHANGELOG",
    "Explanation": "docs/virtual-gpus docs/architecture CONTRIBUTING tests/stand_in/cuda/README",
}

project = "gpumagic"
root_doc = "README"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/library.rst"),
    *("examples/*.ipynb", "tests/stand_in/cuda/README.md"),
]
extensions = [
    *("myst_nb", "sphinx_copybutton", "sphinxcontrib.mermaid"),
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon"),
]
nb_execution_mode = "off"  # they carry their outputs
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have them
myst_fence_as_directive = ["mermaid"]
# Links to a heading, as GitHub has them.
myst_heading_anchors = 3
nitpicky = True
# Types in docstrings are words; pages are linked, and a dead link among them fails.
nitpick_ignore_regex = [("py:.*", ".*")]
# A magic is no Python, and is highlighted as if it were.
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "furo"
html_title = "gpumagic"
html_copy_source = False


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """On the site, the README has all pages at its side, and a link that opens it on Binder."""
    for section, pages in SECTIONS.items() if page == root_doc else ():
        toctree = ["```{toctree}", ":hidden:", f":caption: {section}", "", *pages.split(), "```"]
        source[0] += "\n".join(["", *toctree, ""])
    if page == root_doc:
        # The repository's address stands in package.json alone.
        where = json.loads((ROOT / "package.json").read_text())["homepage"].partition(".com/")[2]
        binder = (
            f"https://mybinder.org/v2/gh/{where}/HEAD?urlpath=lab/tree/examples/quickstart.ipynb"
        )
        opened = f"[Open the quickstart on Binder]({binder}), with two virtual GPUs. Or p"
        source[0] = source[0].replace("## Start\n\nP", f"## Start\n\n{opened}")


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

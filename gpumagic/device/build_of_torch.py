"""Tell for which GPUs torch was built, without importing it: it stands in its ``version.py``."""

import re
from functools import cache
from importlib import util
from pathlib import Path
from typing import NamedTuple


class TorchBuild(NamedTuple):
    """Versions of what torch was built for; None where it was not, or is not installed."""

    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


@cache
def torch_build() -> TorchBuild:
    """As of the torch that this process would import."""
    try:
        spec = util.find_spec("torch")
        folders = list((spec and spec.submodule_search_locations) or ())
        text = (Path(folders[0]) / "version.py").read_text() if folders else ""
    except (OSError, ValueError, ImportError):
        return TorchBuild()
    return read_build(text)


def read_build(text: str) -> TorchBuild:
    """The same of the text of a ``version.py``: ``hip: Optional[str] = '6.4.43482'``."""
    found = dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return TorchBuild(**found)

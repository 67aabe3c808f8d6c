"""Complete the lines of the magics at Tab: devices that exist, and options."""

import re
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from gpumagic.magics.ongpu_line import OPTIONS

_LINE = re.compile(
    r"^\s*%{1,2}(?P<magic>ongpu|gputime|gpus|gpuwatch)\s+(?P<words>.*?)(?P<last>\S*)$"
)
_OPTIONS: dict[str, list[str]] = {
    "ongpu": list(OPTIONS),
    "gputime": [
        "--sweep",
        "--setup",
        "--items",
        "--max-time",
        "--in-place",
        "--output",
        "--against",
        "--quiet",
    ],
    "gpuwatch": ["on", "off", "--report", "--strict"],
    "gpus": ["--processes", "--live", "--doctor", "--virtual", "--memory"],
}
# After these stands a value.
_VALUES: dict[str, list[str]] = {
    "--virtual": ["1", "2", "4", "8", "off"],
    "--against": ["last"],
    **{key: [] for key in ("--sweep", "--setup", "--items", "--max-time", "--output", "-o")},
}


def _complete(context: Any) -> dict[str, Any]:
    """Complete the argument of our magics; leave every other line alone."""
    match = _LINE.match(context.text_until_cursor)
    if match is None:
        return {"completions": []}
    magic, words, last = match["magic"], match["words"].split(), match["last"]
    if magic == "gputime" and "--" in words:
        return {"completions": []}  # what follows is Python
    candidates = [o for o in _OPTIONS[magic] if o.startswith(last) and o not in words]
    if words and words[-1] in _VALUES:
        candidates = [v for v in _VALUES[words[-1]] if v.startswith(last)]
    elif magic == "gpuwatch":
        pass
    elif magic == "gputime":
        # Several, and several at a time: "0+1".
        others, plus, one = last.rpartition("+")
        found = [f"{others}{plus}{offer}" for offer in _devices(one)]
        candidates = [*(f for f in found if f not in words), *candidates]
    elif not [w for w in words if not w.startswith("-")]:
        candidates = [*_devices(last), *candidates]
        if magic == "ongpu" and context.text_until_cursor.lstrip().startswith("%ongpu"):
            candidates += ["off"] if "off".startswith(last) else []
    # The completer's token may begin within our word: "--no" of "--no-move", "1" of "cuda:1".
    skip = len(last) - len(context.token)
    return {
        "completions": [SimpleCompletion(text=c[skip:], type="device") for c in candidates],
        "suppress": True,
    }


complete_where: Any = context_matcher()(_complete)


def _devices(prefix: str) -> list[str]:
    from gpumagic.device import complete, here

    # A cell runs on one device, and a table is of all unless one is named.
    offers = complete(prefix, here(memory=False))
    return [offer for offer in offers if offer != "all" and "," not in offer]

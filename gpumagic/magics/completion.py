"""Complete the lines of the magics at Tab: devices that exist, options, and variables."""

import re
from types import FunctionType, ModuleType
from typing import Any

from IPython import get_ipython
from IPython.core.completer import SimpleCompletion, context_matcher

from gpumagic.magics.arguments import CLUSTER_VERBS, parser_of

_LINE = re.compile(
    r"\s*%{1,2}(ongpu|gputime|gpufit|gpus|gpumem|gpufree|gpuwatch|gpucluster)\s+(.*?)(\S*)$"
)
_VERBS = {
    "gpuwatch": ("on", "off"),
    "gpucluster": CLUSTER_VERBS,
}
_VALUES = {
    "--virtual": ["1", "2", "4", "8", "off"],
    "--against": ["last"],
    "--every": ["10min", "30s", "1h"],
    "--on": ["h100", "a100-80gb", "l4", "rtx4090", "24GiB"],  # without a blank
}
_OF_VARIABLES = ("--split", "--gather", "--reduce")


def _complete(context: Any) -> dict[str, Any]:
    """Complete the argument of our magics; leave every other line alone."""
    match = _LINE.match(context.text_until_cursor)
    if match is None:
        return {"completions": []}
    magic, words, last = match[1], match[2].split(), match[3]
    if (magic == "gputime" and "--" in words) or words[-1:] in (["--to"], ["restore"]):
        return {"completions": []}  # Python, or a directory, which IPython completes
    parser = parser_of(f"%{magic}")
    offers = [option for option in parser.options() if option not in words]
    if words and parser.takes_a_value(words[-1]):
        offers = _VALUES.get(words[-1]) or _after_a_comma(words[-1], last)
    elif magic in _VERBS:
        offers = [*([] if words else _VERBS[magic]), *offers]
    elif magic == "gpumem":
        gpus = (offer for offer in _devices(last) if offer != "cpu")
        offers = [*gpus, *_variables(last), *offers]
    elif magic == "gpufree":
        offers = [*(name for name in _variables(last) if name not in words), *offers]
    elif magic == "gputime":
        # Several, and several at a time: "0+1".
        others, plus, one = last.rpartition("+")
        found = [f"{others}{plus}{offer}" for offer in _devices(one)]
        offers = [*(f for f in found if f not in words), *offers]
    elif not [word for word in words if not word.startswith("-")]:
        offers = [*_devices(last), *offers]
        if magic == "ongpu" and "%%" not in match[0]:
            offers += ["home", "off"]
    # The completer's token may begin within our word: "--no" of "--no-move", "1" of "cuda:1".
    skip = len(last) - len(context.token)
    fit = (offer for offer in offers if offer.startswith(last))
    return {
        "completions": [SimpleCompletion(text=offer[skip:], type="device") for offer in fit],
        "suppress": True,
    }


complete_where: Any = context_matcher()(_complete)


def _after_a_comma(option: str, last: str) -> list[str]:
    """The variables of which an option takes several."""
    others, comma, one = last.rpartition(",")
    taken = others.split(",")
    names = _variables(one) if option in _OF_VARIABLES else []
    return [f"{others}{comma}{name}" for name in names if name not in taken]


def _devices(prefix: str) -> list[str]:
    from gpumagic.device import complete, here

    # A cell runs on one device, and a table is of all unless one is named.
    offers = complete(prefix, here(memory=False))
    return [offer for offer in offers if offer != "all" and "," not in offer]


def _variables(prefix: str) -> list[str]:
    """The user's own, of those that may hold something."""
    shell = get_ipython()
    named = {n: v for n, v in shell.user_ns.items() if n not in shell.user_ns_hidden}
    holding = (n for n, v in named.items() if not isinstance(v, (ModuleType, FunctionType, type)))
    return sorted(n for n in holding if n.startswith(prefix) and not n.startswith("_"))

"""Complete the lines of the magics at Tab: devices, options with their values, and variables."""

import re
from types import FunctionType, ModuleType
from typing import Any

from IPython import get_ipython
from IPython.core.completer import SimpleCompletion

from gpumagic.magics.options import MAGICS, file, options, reductions, variables

_LINE = re.compile(rf"\s*(%{{1,2}}(?:{'|'.join(MAGICS)}))\s+(.*?)(\S*)$")


def completions(context: Any) -> dict[str, Any]:
    """Complete the argument of one of our magics; leave every other line alone."""
    match = _LINE.match(context.text_until_cursor)
    if match is None:
        return {"completions": []}
    typed, words, last = match[1], match[2].split(), match[3]
    magic = typed.lstrip("%")
    option = next(
        (o for o in options(magic) if words and o.examples and words[-1] in o.flags), None
    )
    is_path = option.type is file if option else words[-1:] == ["restore"]
    if is_path or (magic == "gputime" and "--" in words):
        return {"completions": []}  # IPython completes paths and Python
    if option is None:
        offers = [o.flag for o in options(magic) if o.flag not in words]
        offers += _arguments(typed, words, last)
    elif option.type in (variables, reductions):
        # Several, separated by commas.
        others, comma, one = last.rpartition(",")
        names = (name for name in _variables(one) if name not in others.split(","))
        offers = [f"{others}{comma}{name}" for name in names]
    else:
        offers = [example for example in option.examples if " " not in example]
    # The completer's token may begin within our word: "--no" of "--no-move", "1" of "cuda:1".
    skip = len(last) - len(context.token)
    fit = (offer for offer in offers if offer.startswith(last))
    return {
        "completions": [SimpleCompletion(text=offer[skip:], type="device") for offer in fit],
        "suppress": True,
    }


def _arguments(typed: str, words: list[str], last: str) -> list[str]:
    """Return what may stand here besides an option."""
    magic = typed.lstrip("%")
    if verbs := MAGICS[magic].verbs:
        return [] if words else [*verbs]
    if magic == "gpufree":
        return [name for name in _variables(last) if name not in words]
    if magic == "gpumem":
        return [*(name for name in _devices(last) if name != "cpu"), *_variables(last)]
    if magic == "gputime":  # several, also several at the same time: "0+1"
        others, plus, one = last.rpartition("+")
        found = [f"{others}{plus}{name}" for name in _devices(one)]
        return [each for each in found if each not in words]
    if any(not word.startswith("-") for word in words):
        return []
    return [*_devices(last), *["home", "off"] * (typed == "%ongpu")]


def _devices(prefix: str) -> list[str]:
    from gpumagic.device import complete, here

    # A cell runs on one device, and a table is of all unless one is named.
    offers = complete(prefix, here(memory=False))
    return [offer for offer in offers if offer != "all" and "," not in offer]


def _variables(prefix: str) -> list[str]:
    """Return the user's variables, without modules, functions and classes."""
    shell = get_ipython()
    named = {n: v for n, v in shell.user_ns.items() if n not in shell.user_ns_hidden}
    holding = (n for n, v in named.items() if not isinstance(v, (ModuleType, FunctionType, type)))
    return sorted(n for n in holding if n.startswith(prefix) and not n.startswith("_"))

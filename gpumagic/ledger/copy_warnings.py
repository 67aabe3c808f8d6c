"""When a copy or a wait is worth a warning, and the words.

Legal mixing gives none: a number or a zero-dimensional CPU tensor beside GPU tensors, a copy that
names its device, a value that is read or printed now and then, what a library does by itself.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

from gpumagic.errors import CrossDeviceWarning
from gpumagic.ledger.advice import advise
from gpumagic.ledger.attribute import HOST, here
from gpumagic.ledger.counts import Count
from gpumagic.ledger.via import DISPLAY, ENGINE, FIX, LOADER, PRINT
from gpumagic.usercode.lines import line_of

# Calls at one line. A value that is read once in each of a few epochs is no crawl.
_OFTEN = 16
# Copies that name their device are the user's to make; so many to the host at one line are a log
# that is read value by value.
_EXPLICIT = 100


@dataclass(eq=False)
class Alarm:
    """The alarms of one watch: at most one for each line."""

    strict: bool = False  # raise at the first that is implicit
    _lines: set[tuple[str, int]] = field(default_factory=set)

    def __call__(self, count: Count, tensor: Any) -> None:
        """Warn before a call, or raise `CrossDeviceWarning`, if it is time to."""
        __tracebackhide__ = True
        if count.how in (LOADER, ENGINE, DISPLAY, FIX):
            count.warned = True
        elif not count.implicit:
            if count.destination != "cpu":
                count.warned = True
            elif count.count + 1 >= _EXPLICIT:
                self._warn(count)
        elif count.copy and count.operator == "copy_" and _is_scalar_of_host(tensor):
            return
        elif self.strict:
            raise CrossDeviceWarning(_refusal(count))
        elif count.within:  # counted, but not the user's to fix
            count.warned = True
        elif _is_time(count):
            self._warn(count)

    def _warn(self, count: Count) -> None:
        __tracebackhide__ = True
        count.warned = True
        if count.code is None:
            return
        place = count.code.co_filename, line_of(count.code, count.at)
        if place in self._lines:
            return
        self._lines.add(place)
        # A registry of its own: Python's would keep a line 4 quiet in every cell after the first.
        warnings.warn_explicit(_words(count), CrossDeviceWarning, *place, registry={})


def _is_scalar_of_host(tensor: Any) -> bool:
    return bool(tensor.get_device() == HOST and tensor.dim() == 0)


def _is_time(count: Count) -> bool:
    if count.how == PRINT:
        return count.calls + 1 >= _OFTEN and here.counted != here.serial
    return count.count + 1 >= (2 if count.operator == "index" and count.copy else _OFTEN)


def _what(count: Count) -> str:
    code = count.entry().code
    where = f"`{code}` " if code else ""
    if count.copy:
        what = "its index" if count.operator == "index" else "data"
        return f"{where}copies {what} from {count.source} to {count.destination}"
    return f"{where}makes the host wait for {count.source}"


def _words(count: Count) -> str:
    entry = count.entry(at_least=2)
    advice = advise(entry)
    again = " again and again" if count.count else ""
    return f"{_what(count)}{again}" + (f"; {advice.text}" if advice else "")


def _refusal(count: Count) -> str:
    line = "" if count.code is None else f"line {line_of(count.code, count.at)}: "
    if count.copy and count.operator == "index":
        ask = f"bring the index there first: index.to('{count.destination}')"
    else:
        ask = "name the device: x.cpu() or x.to(...) first"
    return f"{line}{_what(count)}, which strict does not allow; {ask}"

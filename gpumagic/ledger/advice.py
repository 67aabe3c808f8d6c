"""Advise on copies and waits that repeat, and warn about them.

No warning for what is normal: a number or a zero-dimensional CPU tensor used with GPU tensors, a
copy that names its device, a value that is read or printed now and then, a library's own copies.
"""

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gpumagic.errors import CrossDeviceWarning, ImplicitCopyError
from gpumagic.ledger.attribute import HOST, here
from gpumagic.ledger.entry import DISPLAY, ENGINE, LOADER, PRINT, Count, Entry
from gpumagic.usercode.lines import line_at, line_of

_READS = ("cpu", "item", "numpy", "tolist")
_NUMBERS = ("bool", "float", "int")
# How several values are put together and read, and one, by the framework whose they are. Batches
# are concatenated: the last one may be shorter.
_TOGETHER = {
    "": "torch.stack({}).cpu()",
    "JAX": "jax.device_get(jnp.stack({}))",
    "TensorFlow": "tf.stack({}).numpy()",
}
_BATCHES = "torch.cat({}).cpu()"
_ONE = {"": "{}.item()", "JAX": "float({})", "TensorFlow": "{}.numpy()"}
_LONG = 40  # characters of an expression that a sentence still bears


@lru_cache(maxsize=256)
def keep(code: str, line: str, framework: str = "", *, batches: bool = False) -> str:
    """Return what to write instead of the expression `code` in a `line` of the source.

    With `batches`, its values are tensors of torch with dimensions, not numbers.
    """
    read = _tree(code, "eval")
    value = _value(read.body) if isinstance(read, ast.Expression) else None
    name = "x" if value is None or len(ast.unparse(value)) > _LONG else ast.unparse(value)
    detached = name
    if not framework:
        whole = value if value is not None and name != "x" else ast.Name("x", ast.Load())
        detached = ast.unparse(ast.Call(ast.Attribute(whole, "detach", ast.Load()), [], []))
    every, summed = _collected(line, read)
    together = _BATCHES if batches else _TOGETHER[framework]
    if code.endswith(".tolist()"):  # a list of numbers, which a list is extended by
        every, summed, together = every or summed, "", together.replace(".cpu()", ".tolist()")
    if every:
        return (
            f"keep {every} on the device, {every}.append({detached}), and read it once after the "
            f"loop: {together.format(every)}"
        )
    if summed:
        return (
            f"keep {summed} on the device, {summed} += {detached}, and read it once after the "
            f"loop: {_ONE[framework].format(summed)}"
        )
    kept = "what it reads" if name == "x" else name
    return f"keep {kept} on the device, and read it once after the loop"


def _tree(text: str, mode: str) -> ast.AST | None:
    try:
        made: ast.AST = ast.parse(text.strip(), mode=mode)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return made


def _value(read: ast.expr) -> ast.expr | None:
    """Return the tensor that is read: ``loss`` for ``loss.item()`` and ``float(loss)``."""
    if not isinstance(read, ast.Call):
        return None
    if isinstance(read.func, ast.Attribute) and read.func.attr in _READS and not read.args:
        return _value(read.func.value) or read.func.value
    if isinstance(read.func, ast.Name) and read.func.id in _NUMBERS and len(read.args) == 1:
        return _value(read.args[0]) or read.args[0]
    return None


def _collected(line: str, read: ast.AST | None) -> tuple[str, str]:
    """Return the names of the list that it is appended to, and of the sum that it is added to."""
    every = summed = ""
    wanted = _about(read.body) if isinstance(read, ast.Expression) else None
    for node in ast.walk(_tree(line, "exec") or ast.Pass()):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            summed = ast.unparse(node.target) if _about(node.value) == wanted else summed
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("append", "extend"):
            name = ast.unparse(node.func).rpartition(".")[0]
            every = name if wanted in [_about(argument) for argument in node.args] else every
    return every, summed


def _about(node: ast.expr) -> str:
    """Return the tensor that is read, or else the expression itself."""
    return ast.unparse(_value(node) or node)


_ONCE = "the size of its result depends on the data; do it once, before the loop"
_BY_SIZE = {
    "bincount": _ONCE,
    "equal": "compare on the device, (a == b).all(), and read that later",
    "repeat_interleave": "give it output_size=, and it need not wait",
}
_MASK = (
    "the size of its result depends on the data; torch.where(mask, x, 0) keeps the size and "
    "does not wait"
)
_STACK = "torch.stack([...]) puts them together on the device"
_NEW_TENSOR = ("torch.tensor(", "torch.as_tensor(")
_CHECKS = "it checks its arguments; validate_args=False leaves that out"
_SCALAR = 16  # bytes of a complex number
_NUMBER = 8  # and of any other
_MADE_ON_HOST = re.compile(
    r"\b(arange|empty|eye|full|linspace|ones|rand|randint|randn|randperm|tensor|zeros)\("
    r".*\)\.(to|cuda)\([^()]*\)$"
)
_PIN = "pin its memory, x.pin_memory() or DataLoader(..., pin_memory=True)"
_SMALL = 16 * 1024  # bytes: below, a copy takes as long as any
_OVERLAP = "at most: all of it, if it runs during the computation"
# Calls at one line. A value that is read once in each of a few epochs is no crawl.
OFTEN = 16
# Copies that name their device are the user's to make; so many to the host at one line are a log
# that is read value by value.
_EXPLICIT = 100
SILENT = ("index", "operand", "tf.function")
"""Operators that copy silently each time: the second time is one too many."""
ADVISERS: defaultdict[str, "Callable[[Entry], Advice | None]"] = defaultdict(
    lambda: lambda entry: None
)
"""Functions that advise on what only one framework does, by `Entry.framework`."""


@dataclass(frozen=True)
class Advice:
    """Record what to do, how many calls that saves, and which part of the time, in words too."""

    text: str
    saved: int
    share: float
    how: str


def advise(entry: Entry) -> Advice | None:
    """Advise on one entry; None if it is as it should be."""
    many = entry.calls > entry.sites
    if entry.framework:
        return _of_arrays(entry) if many or entry.kind == "placement" else None
    if entry.via in ("display", "backward"):
        return None
    if entry.within:
        checks = many and entry.within.startswith("torch.distributions")
        return all_of_them(entry, _CHECKS) if checks else None
    if entry.operator == "index" and entry.kind == "copy":
        text = f"the index lies on the CPU; bring it once: index = index.to('{entry.destination}')"
        return all_but_one(entry, text)
    if entry.kind == "wait":
        return _of_wait(entry) if many else None
    return _of_copy(entry) if many else None


def _of_arrays(entry: Entry) -> Advice | None:
    """Advise on arrays of another framework than torch."""
    if entry.via == "display" or (entry.within and entry.framework == "JAX"):
        return None
    if (advice := ADVISERS[entry.framework](entry)) is not None:
        return advice
    # One call of JAX may copy many arrays; what it copies implicitly is one too many.
    if entry.calls < OFTEN and not (entry.framework == "JAX" and entry.implicit):
        return None
    if entry.via == "print":
        where = "sharding" if entry.framework == "JAX" else "device"
        text = f"print after the loop; x.shape and x.{where} print without waiting"
    elif entry.kind == "wait" or entry.destination == "cpu":
        text = _keep(entry)
    elif entry.nbytes < entry.count * _SMALL:
        text = "many small copies: put them into one array and copy that"
    else:
        return None
    return all_but_one(entry, text)


def is_crawl(entry: Entry) -> bool:
    """Whether it deserves a warning by `Alarm`, not only its line in the ledger."""
    if entry.kind == "placement":
        return True
    if entry.within or entry.via in ("backward", "display", "loader"):
        return False
    if not entry.implicit:
        return entry.destination == "cpu" and entry.count >= _EXPLICIT
    silent = entry.operator in SILENT and entry.kind == "copy"
    return entry.calls >= (2 if silent else OFTEN)


def _keep(entry: Entry) -> str:
    batches = entry.kind == "copy" and entry.nbytes > entry.count * _NUMBER
    source = entry.where.source if entry.where else ""
    return keep(entry.code, source, entry.framework, batches=batches and not entry.framework)


def _of_wait(entry: Entry) -> Advice | None:
    if "output_size=" in entry.code:
        return None
    if entry.via == "print":
        text = "print after the loop; x.shape and x.device print without waiting"
    elif entry.operator == "item":
        text = _STACK if entry.code.startswith(_NEW_TENSOR) else _keep(entry)
    elif entry.operator == "synchronize":
        text = "wait once, after the loop"
    else:
        text = _BY_SIZE.get(entry.operator, _ONCE if "unique" in entry.operator else _MASK)
        return all_of_them(entry, text)
    return all_but_one(entry, text)


def _of_copy(entry: Entry) -> Advice | None:
    if entry.repeats:
        text = f"the same tensor each time; move it to {entry.destination} once, before the loop"
        share = entry.repeats / entry.count
        return Advice(text, entry.repeats, share, "the time of all but the first")
    if entry.via == "loader":
        text = "pin its batches: DataLoader(..., pin_memory=True)"
        return None if entry.pinned else Advice(text, 0, 1.0, _OVERLAP)
    if entry.source == "cpu":
        return _of_brought(entry)
    if entry.destination == "cpu":
        return all_but_one(entry, _keep(entry))
    return None


def _of_brought(entry: Entry) -> Advice | None:
    if entry.implicit and entry.nbytes > entry.count * _SCALAR:
        text = f"what is indexed or assigned with lies on the CPU; bring it to {entry.destination}"
        return all_but_one(entry, f"{text} once")
    if _MADE_ON_HOST.search(entry.code):
        text = f"make it there: device='{entry.destination}' instead of .to"
        return all_of_them(entry, text)
    if entry.nbytes < entry.count * _SMALL:
        return all_but_one(entry, "many small copies: put them into one tensor and copy that")
    if entry.blocking:
        pinned = "" if entry.pinned else f"{_PIN}, and "
        text = f"{pinned}.to('{entry.destination}', non_blocking=True)"
        return Advice(text, 0, 1.0, _OVERLAP)
    return None


def all_of_them(entry: Entry, text: str) -> Advice:
    """Advise to make none of the calls."""
    return Advice(text, entry.count, 1.0, "the time of all of them")


def all_but_one(entry: Entry, text: str) -> Advice:
    """Advise to make one call instead of many at each place."""
    calls = max(entry.calls // max(entry.sites, 1), 1)
    saved = entry.count - round(entry.count / calls)
    return Advice(text, saved, 1 - 1 / calls, f"the time of all but one of {calls:,}")


@dataclass(eq=False)
class Alarm:
    """Raise the alarms of one watch: at most one for each line."""

    strict: bool = False  # raise at the first that is implicit
    _lines: set[tuple[str, int]] = field(default_factory=set)

    def __call__(self, count: Count, tensor: Any) -> None:
        """Warn before a call, or raise `ImplicitCopyError`, if it is time to."""
        __tracebackhide__ = True
        if count.how in (LOADER, ENGINE, DISPLAY) or (count.within and not count.implicit):
            count.warned = True
        elif not count.implicit:
            if count.destination != "cpu":
                count.warned = True
            elif count.count + 1 >= _EXPLICIT:
                self._warn(count)
        elif count.copy and count.operator == "copy_" and _is_scalar_of_host(tensor):
            return
        elif self.strict:
            raise ImplicitCopyError(_refusal(count))
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
        return count.calls + 1 >= OFTEN and here.counted != here.serial
    return count.count + 1 >= (2 if count.operator == "index" and count.copy else OFTEN)


def what(count: Count) -> str:
    """Describe a count's next call in words."""
    code = count.entry().code
    where = f"`{code}` " if code else ""
    if count.copy:
        what = "its index" if count.operator == "index" else "data"
        return f"{where}copies {what} from {count.source} to {count.destination}"
    if count.kind == "placement":
        return f"{where}is on {count.destination}, and was asked for {count.source}"
    return f"{where}makes the host wait for {count.source}"


def _words(count: Count) -> str:
    entry = count.entry(at_least=2)
    advice = advise(entry)
    again = " again and again" if count.count else ""
    return f"{what(count)}{again}" + (f"; {advice.text}" if advice else "")


def _refusal(count: Count) -> str:
    line = "" if count.code is None else f"{line_at(count.code, count.at).place}: "
    if count.copy and count.operator == "index":
        ask = f"bring the index there first: index.to('{count.destination}')"
    else:
        ask = "name the device: x.cpu() or x.to(...) first"
    return f"{line}{what(count)}, which strict does not allow; {ask}"

"""Show a ledger (the copies and waits of a run) as one line, or as a table with advice."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpumagic.device import cuda_state
from gpumagic.display import table
from gpumagic.display.table import block, coded, tag
from gpumagic.display.units import duration, many, size, some
from gpumagic.ledger.entry import DISPLAY, ENGINE, LOADER, OFTEN, PRINT, Entry, Ledger
from gpumagic.usercode import frames
from gpumagic.usercode.files import parsed

NOTHING = "no copies between devices, no waits for a GPU"
_VIRTUAL = "Times on virtual GPUs are the CPU's and say nothing about a GPU: savings are in calls."
_PREDICTED = "Predicted: nothing was copied, so there are no times. Savings are in calls."
_REAL = "Savings are estimated from the measured times, without the GPU's idle time after a wait."
_CODE = 60  # maximum number of characters shown of a source line or expression
_HINTS = 3  # maximum lines of advice if no table is shown
_LONG = 40  # maximum characters of an expression in a sentence

EXPLICIT = 100  # minimum number of explicit copies to the host at one line for advice
_SILENT = ("index", "operand", "tf.function")  # operators that copy silently in each call
_SCALAR = 16  # maximum bytes of a single number
_SMALL = 16 * 1024  # bytes; the time of smaller copies does not depend on their size


@dataclass(frozen=True)
class Advice:
    """Advice on an entry, and the number of copies or waits that the advice saves."""

    text: str
    saved: int = 0


def all_but_one(entry: Entry, text: str) -> Advice | None:
    """Return advice that saves all calls of an entry except one; None if `text` is empty."""
    return Advice(text, entry.count - round(entry.count / entry.calls)) if text else None


ADVISERS: dict[str, Callable[[Entry], Advice | None]] = {}
"""Functions that return advice specific to a framework, by `Entry.framework`."""


def advise(entry: Entry) -> Advice | None:
    """Return the advice on one entry; None if there is nothing to improve."""
    if entry.via in (DISPLAY, ENGINE) or (entry.calls < 2 and entry.kind != "placement"):
        return None
    if entry.within:
        checks = entry.within.startswith("torch.distributions")
        return Advice(_CHECKS, entry.count) if checks else None
    adviser: Callable[[Entry], Advice | None] = ADVISERS.get(entry.framework, lambda entry: None)
    if (advice := adviser(entry)) is not None:
        return advice
    # One TensorFlow call or explicit JAX call may count several times, so ignore small numbers.
    often = not entry.framework or (entry.framework == "JAX" and entry.implicit)
    if entry.calls < OFTEN and not often:
        return None
    return _of_wait(entry) if entry.kind == "wait" or entry.via == PRINT else _of_copy(entry)


_CHECKS = "the distribution checks its arguments; validate_args=False turns this off"
_BY_DATA = (
    "the result's size depends on the data: compute it once, before the loop; instead of a mask, "
    "torch.where(mask, x, 0) keeps the size and does not wait"
)
_PIN = "pin the host's memory: x.pin_memory() or DataLoader(..., pin_memory=True); "
_MADE_ON_HOST = re.compile(
    r"\b(arange|empty|eye|full|linspace|ones|rand|randint|randn|randperm|tensor|zeros)\("
    r".*\)\.(to|cuda)\([^()]*\)$"
)


def _of_wait(entry: Entry) -> Advice | None:
    if entry.via == PRINT:
        text = "print after the loop; x.shape and x.device print without waiting"
    elif entry.operator == "synchronize":
        text = "wait once, after the loop"
    elif entry.operator == "equal":
        text = _keep(entry) and "compare on the device, (a == b).all(), and read the result later"
    elif entry.operator == "histc":
        return Advice("pass min= and max= to avoid the wait", entry.count)
    elif entry.operator != "item" and not entry.framework:
        return Advice(_BY_DATA, entry.count)
    elif entry.code.startswith(("torch.tensor(", "torch.as_tensor(")):
        text = "torch.stack([...]) joins the values on the device"
    else:
        text = _keep(entry)
    return all_but_one(entry, text)


def _of_copy(entry: Entry) -> Advice | None:
    there, what = entry.destination, "array" if entry.framework else "tensor"
    if entry.repeats:
        text = f"the same {what} each time; move it to {there} once, before the loop"
        return Advice(text, entry.repeats)
    if entry.via == LOADER:
        return None if entry.pinned else Advice("pin the batches: DataLoader(..., pin_memory=True)")
    if there == "cpu":
        return all_but_one(entry, _keep(entry))
    return _of_copy_from_host(entry) if entry.source == "cpu" else None


def _of_copy_from_host(entry: Entry) -> Advice | None:
    there = entry.destination
    data = entry.operator == "index" or entry.nbytes > entry.count * _SCALAR
    if entry.implicit and data and not entry.framework:
        cure = f"create it with device='{there}', or move it once"
        return Advice(f"an index or a value is on the CPU: {cure}")
    if _MADE_ON_HOST.search(entry.code):
        return Advice(f"create the data there: device='{there}' instead of .to", entry.count)
    if entry.nbytes < entry.count * _SMALL:
        return all_but_one(entry, "many small copies: combine them, and copy once")
    if entry.blocking and not entry.framework:
        pin = "" if entry.pinned else _PIN
        return Advice(f"{pin}.to('{there}', non_blocking=True) copies during the computation")
    return None


_READ = re.compile(r"(?:bool|float|int)\((.+)\)|(.+)\.(?:clone|cpu|detach|item|numpy|tolist)\(\)")
_INTO = re.compile(r"([\w.]+)(?:\.(?:append|extend)\((.+)\)| \+= (.+))$")
_INNERMOST = re.compile(r"[(\[][^()\[\]]*[)\]]")


def _keep(entry: Entry) -> str:
    """Return advice to keep values on a device; empty if the host needs them or no room is left."""
    where, tensor = entry.where, _tensor_of(entry.code)
    if (where and _decides(where.file, where.line, entry.code)) or not _fits(entry):
        return ""
    named = tensor != entry.code and len(tensor) <= _LONG
    kept = tensor if named else "…"
    # With `detach`, each graph can be freed. With `clone`, the storage behind a view can be freed.
    if not entry.framework:
        kept = f"({kept})" if " " in _INNERMOST.sub("", kept) else kept
        kept = f"{kept}.detach().clone()"
    into = _container(entry, tensor)
    what, instead = into or (kept if named else "the value"), ","
    if into or (tensor != entry.code and not named):
        read = entry.code if named or tensor == entry.code else entry.code.replace(tensor, "…")
        instead = f", with {kept} in place of {table.short(read, _LONG)},"
    return f"leave {what} on the device{instead} and read it once after the loop"


def _decides(file: str, line: int, code: str) -> bool:
    """Whether a branch, loop or index depends on an expression, or on names computed from it."""
    nodes: Any = [*ast.walk(parsed(file).tree or ast.Pass())]
    decisive = _decisive(nodes)
    here = (n for n in nodes if isinstance(n, ast.expr) and n.lineno <= line <= (n.end_lineno or 0))
    with suppress(SyntaxError, ValueError, RecursionError):
        code = ast.unparse(ast.parse(code, mode="eval"))
        same = [node for node in here if ast.unparse(node) == code]
        # Assume a dependency for every subscript, such as `x[i]`.
        return any(isinstance(n, ast.Subscript) or decisive & {n, *_reads_of(n)} for n in same)
    return False


_KEEPING = ("append", "extend", "print", "float", "int", "sum", "round", "len", "mean", "stack")


def _decisive(nodes: list[Any]) -> set[ast.AST]:
    """Return the nodes in conditions, indices and iterables, and in values that code passes on."""
    parts = [getattr(n, name, None) for n in nodes for name in ("test", "iter", "slice", "subject")]
    parts += [test for node in nodes for test in getattr(node, "ifs", ())]  # `if` in comprehensions
    found = {node for part in parts if part is not None for node in ast.walk(part)}
    return found | _passed_on(nodes)


def _passed_on(nodes: list[Any]) -> set[ast.AST]:
    """Return the nodes that code returns, yields or passes to a function not in `_KEEPING`."""
    waiting: list[Any] = [n.value for n in nodes if isinstance(n, (ast.Return, ast.Yield))]
    for call in (n for n in nodes if isinstance(n, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        waiting += given if name not in _KEEPING else []
    found = set[ast.AST]()
    for node in waiting:
        if node is not None and not isinstance(node, frames.OWN_SCOPES):
            found.add(node)
            waiting += ast.iter_child_nodes(node)
    return found


def _reads_of(node: ast.AST) -> list[ast.AST]:
    """Return the names computed from `node`'s value in the loop or function around `node`."""
    inner = [each for each in frames.parents(node) if isinstance(each, frames.OWN_SCOPES)]
    within: Any = [*inner, *frames.loops_around(node), frames.function_of(node)][0]
    stmt: Any = frames.statement(node)
    into = ast.unparse(stmt).partition(".append(")[0]  # "losses" if `losses.append(x.item())`
    names = {into, *frames.stored(stmt)}
    assigned = (ast.Assign, ast.AnnAssign, ast.AugAssign)
    found = frames.computed_from([*names], [n for n in ast.walk(within) if isinstance(n, assigned)])
    return [n for n in ast.walk(within) if isinstance(n, ast.Name) and n.id in found]


def _container(entry: Entry, tensor: str) -> str:
    """Return the variable to which a line appends or adds the tensor's value, or ""."""
    found = _INTO.search(entry.where.source) if entry.where else None
    return found[1] if found and _tensor_of(found[2] or found[3]) == tensor else ""


def _fits(entry: Entry) -> bool:
    """Whether the source GPU has room to keep all copied values; True if unknown."""
    kind, _, number = entry.source.partition(":")
    known = kind == "cuda" and int(number or 0) in cuda_state.started()
    return not known or entry.nbytes <= cuda_state.free_bytes(entry.source)


def _tensor_of(code: str) -> str:
    """Return the code of the tensor read: ``loss`` for ``loss.item()`` and ``float(loss)``."""
    while found := _READ.fullmatch(code):
        code = found[1] or found[2]
    return code


def line(ledger: Ledger, *, without: tuple[str, ...] = ()) -> str:
    """Return a summary such as ``3 transfers: …``, without entries whose `via` is in `without`."""
    kinds: dict[str, list[Entry]] = {"copy": [], "wait": [], PRINT: [], "placement": []}
    for entry in ledger.entries:
        if entry.via not in without:
            kinds[PRINT if entry.via == PRINT else entry.kind].append(entry)
    return "; ".join(_said(kind, entries) for kind, entries in kinds.items() if entries)


def _said(kind: str, entries: list[Entry]) -> str:
    """Describe entries of one kind: how many there are, and the line with most of them."""
    reads = sum(e.count for e in entries)
    count = sum(e.calls for e in entries) if kind == PRINT else reads
    said = many(count, "wait")
    if kind == "copy":
        said = f"{many(count, 'transfer')}: {', '.join(_sent(entries))}"
    elif kind == PRINT:
        what = "array" if any(e.framework for e in entries) else "tensor"
        said = f"{many(count, what)} printed in {many(reads, 'read')}"
    elif kind == "placement":
        where = dict.fromkeys(f"{e.destination}, not {e.source}" for e in entries)
        said = f"{many(count, 'result')} on {', '.join(where)}"
    return said + _at(entries, count, calls=kind == PRINT)


def _sent(copies: list[Entry]) -> Iterator[str]:
    """Yield the bytes for each destination: ``12.0 MiB to cuda:1``."""
    for device in dict.fromkeys(e.destination for e in copies):
        yield f"{_bytes([e for e in copies if e.destination == device])} to {device}"


def _bytes(entries: list[Entry]) -> str:
    """Return the bytes as text: ``"3.2 MiB"``, or ``"≥ 3.2 MiB"`` if some are unknown."""
    nbytes = sum(e.nbytes for e in entries)
    if not any(e.unsized for e in entries):
        return size(nbytes)
    return f"≥ {size(nbytes)}" if nbytes else "unknown bytes"


def _at(entries: list[Entry], total: int, *, calls: bool = False) -> str:
    """Return the most frequent line: ``" at line 4: `loss.item()`"``; empty if none stands out."""
    lines = defaultdict[str, Counter[str]](Counter)  # counts by line, then by expression
    for e in entries:
        if e.where is not None:
            lines[e.where.place][e.code] += e.calls if calls else e.count
    if not lines:
        return ""
    place, counts = max(lines.items(), key=lambda item: item[1].total())
    most, codes = counts.total(), [code for code, _ in counts.most_common() if code]
    # Omit a line with less than half of the copies, or with a single copy that is not silent.
    few = most < 2 and entries[0].operator not in _SILENT
    if entries[0].kind == "copy" and (few or most < total / 2):
        return ""
    part = f", {most:,} of them" if most < total else ""
    shown = some([f"`{table.short(code, _CODE // min(len(codes), 2))}`" for code in codes], 2)
    return f"{part} at {place}{': ' * bool(shown)}{shown}"


def hints(ledger: Ledger) -> list[str]:
    """Return advice for the lines that copy or wait most often, the most frequent first."""
    found: dict[str, int] = {}
    for e in filter(_gets_hint, ledger.entries):
        if (advice := advise(e)) is not None:
            place = f"{e.where.place}: " if e.where else ""
            found[f"{place}{advice.text}"] = e.count
    return sorted(found, key=lambda words: -found[words])[:_HINTS]


def _gets_hint(entry: Entry) -> bool:
    """Whether an entry gets advice even if the table is not shown."""
    if entry.kind == "placement":
        return True
    if entry.within or entry.via in (DISPLAY, ENGINE, LOADER):
        return False
    if not entry.implicit:
        return entry.destination == "cpu" and entry.count >= EXPLICIT
    return entry.calls >= (2 if entry.operator in _SILENT and entry.kind == "copy" else OFTEN)


def text(ledger: Ledger) -> str:
    """Return the table as text: a row for each entry, with its advice below."""
    if not ledger.entries:
        return NOTHING
    return "\n".join([*table.lines(_columns(ledger)), *table.wrapped(_note(ledger), more="")])


def html(ledger: Ledger, *, with_line: bool = True) -> str:
    """Return the table as HTML; if `with_line`, below the summary that `line` returns."""
    if not ledger.entries:
        return block(tag("div", NOTHING, "gm-caption"))
    caption = f'<div class="gm-caption">{coded(line(ledger))}</div>' if with_line else ""
    note = tag("div", _note(ledger), "gm-note gm-dim")
    return block(f"{caption}{table.html(_columns(ledger))}{note}")


def _columns(ledger: Ledger) -> list[table.Column]:
    entries = ledger.entries
    places = [e.where.place.removeprefix("line ") if e.where else "elsewhere" for e in entries]
    return [
        table.Column("line", places, number=True),
        table.Column(
            "source",
            [table.short((e.where and e.where.source) or e.code, _CODE) for e in entries],
            fit="cut",
            notes=[_advice(e, ledger) for e in entries],
            css="gm-code gm-long",
        ),
        table.Column("what", [_what(e) for e in entries], fit="wrap", least=38, css="gm-long"),
        table.Column("count", [f"{e.count:,}" for e in entries], number=True),
        table.Column("bytes", [_bytes([e]) for e in entries], number=True),
        table.Column("time", [duration(e.seconds) for e in entries], number=True),
    ]


def _what(e: Entry) -> str:
    if e.kind == "placement":
        return f"asked for {e.source}, got {e.destination} ({e.operator})"
    way = f"{e.source} → {e.destination}" if e.kind == "copy" else f"waits for {e.source}"
    how = e.via or ("implicit" if e.implicit else "explicit")
    if e.within and not e.via:  # "torch.optim.lbfgs"
        how = "in " + ".".join(e.within.split(".")[:2])
    batch = e.kind == "copy" and e.source == "cpu" and e.operator == "copy_" and not e.implicit
    pinned = "" if e.pinned is None or not batch else ", pinned" if e.pinned else ", not pinned"
    return f"{way} ({e.operator}, {how}{pinned})"


def _advice(e: Entry, ledger: Ledger) -> str:
    """Return the advice, the number of calls that it saves, and on a real GPU the saved time."""
    if (advice := advise(e)) is None:
        return ""
    if not advice.saved:
        return f"→ {advice.text}"
    saved = f"{advice.saved:,} of {e.count:,} {'waits' if e.kind == 'wait' else 'copies'}"
    if not ledger.virtual and e.seconds is not None:
        saved += f", ≈ {duration(e.seconds * advice.saved / e.count)}"
    return f"→ {advice.text}; saves {saved}"


def _note(ledger: Ledger) -> str:
    measured = _VIRTUAL if ledger.virtual else _REAL
    return _PREDICTED if ledger.predicted else measured


def bundle(ledger: Ledger) -> dict[str, object]:
    """Return a MIME bundle of the ledger's line and hints; empty if there is no line."""
    said = line(ledger, without=(DISPLAY,))
    lines = [said, *(f"→ {hint}" for hint in hints(ledger))]
    html = block("".join(f'<div class="gm-note">{coded(line)}</div>' for line in lines))
    if not said:
        return {}
    return {"text/plain": "\n".join(lines), "text/html": html, table.JSON: table.as_json(ledger)}

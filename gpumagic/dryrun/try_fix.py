"""Try the fix of a device error in dry runs of the failed cell, and complete the fix.

The dry run starts at the failed statement, or at an earlier statement that the fix changes. If
the changed code raises another device error, the fix of this error is added and tried too. If
earlier cells began with `%%ongpu 1`, this line is also tried as the failed cell's first line.
"""

import ast
import linecache
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import chain, product
from types import CodeType, FunctionType
from typing import Any

from gpumagic import faults
from gpumagic.display.progress_line import ProgressLine
from gpumagic.dryrun.follow_code import Note, Subject, dry, leave_out_magics
from gpumagic.dryrun.held_memory import target_of
from gpumagic.dryrun.result import DryRun
from gpumagic.errors import GpuError
from gpumagic.mismatch.callers import refilled
from gpumagic.mismatch.explainer import explain, in_library
from gpumagic.mismatch.explanation import NEAR, Explanation, Fix, total
from gpumagic.mismatch.operation import read
from gpumagic.usercode.files import label, last_cell
from gpumagic.usercode.frames import FailedFrame, errors, failed_frames, functions_again
from gpumagic.usercode.variables import names_read, variables_read

_LIMIT_S, _MOST = 2.0, 4  # seconds of each dry run, and number of edits that are tried
_BATCHES = 2  # number of batches that a dry run reads from each DataLoader
_Cost = tuple[int, int]  # number of fixes that copy repeatedly, and number of all edits
_PLACED = re.compile(r"\s*%%ongpu\b\s*(?:cuda:|/?gpu:)?([^\s?]*)")
_PLACES_ITSELF = re.compile(r"^\s*%%?(?:ongpu|gpu\w+)\b", re.MULTILINE)


def try_fix(
    error: BaseException, found: Explanation | None, shell: Any = None
) -> Explanation | None:
    """Return `found` with a completed fix, and with a `%%ongpu` line if the line fixes the cell.
    If `found` is None, explain a library's error that a `%%ongpu` line fixes, or return None."""
    said = next(filter(read, errors(error)), None)  # None if no error is about devices
    every = failed_frames(said.__traceback__) if said is not None else []
    at_top = [n for n, frame in enumerate(every) if frame.at_top and frame.tree is not None]
    tried = found or (in_library(every[0], read(said)) if said and at_top else None)
    if tried is None or not at_top:
        return found
    # If a fix contains a magic, parsing raises SyntaxError, and the fix is not tried.
    ends = suppress(GpuError, SyntaxError, KeyboardInterrupt)
    with ProgressLine(shell) as line, faults.kept("trying a fix"), ends:
        line.update("trying the fix; Ctrl-C ends it")
        trial = _Trial(shell, every[: at_top[0] + 1])
        tried = trial.placed(tried)
        found = tried if found or tried.first else None
        return found and trial.with_fewest_edits(found, said)
    return found


class _Trial:
    def __init__(self, shell: Any, frames: list[FailedFrame]) -> None:
        self._shell, self._frames, self._top = shell, frames, frames[-1]
        self._transform = str if shell is None else shell.transform_cell
        self._namespace: Any = frames[-1].scope.outer
        self._before = {frame.filename: frame.source for frame in frames}

    def placed(self, found: Explanation) -> Explanation:
        """Add an earlier cell's `%%ongpu` line to `found` if the failed cell then works."""
        here = self._shell is not None and label(self._top.filename) == last_cell()
        if not (number := here and self._gpu_of_earlier(found)):
            return found
        run = self._dry(ast.parse(self._top.source).body, {}, number)
        if self._ends_early(run) or run.mismatches or run.error:
            return found
        # `run` counts only if a dry run without `%%ongpu` predicts the error, or skips code that
        # may have raised the error, such as a magic.
        now = self._dry(self._from_change(self._before), {})
        known = now.mismatches or not all(unknown.ended for unknown in now.unknown)
        return replace(found, first=f"%%ongpu {number}") if known else found

    def _ends_early(self, run: DryRun) -> bool:
        """Whether a dry run of the whole cell ended above the failed line."""
        ends = (each.where for each in run.unknown if each.ended and each.where is not None)
        return any(at.label == last_cell() and at.line < self._top.line for at in ends)

    def _gpu_of_earlier(self, found: Explanation) -> str:
        """Return the number of an operand's GPU if earlier `%%ongpu` lines name it; else empty."""
        *earlier, now = getattr(self._shell.history_manager, "input_hist_raw", [""])
        used = {match[1] for match in map(_PLACED.match, earlier) if match}
        gpus = {d.partition(":")[2] for o in found.operands for d in o.devices if d != "cpu"}
        moved = [o for o in found.operands if o.odd or o.along] or found.operands
        to_gpu = any(o.devices == ("cpu",) for o in moved)
        # Prefer a fix that moves nothing and is in another cell, because it corrects the cause.
        lasts = found.fix is not None and found.fix.nbytes == 0 and found.fix.label != last_cell()
        alone = len(gpus & used) == 1 and to_gpu and not lasts and not _PLACES_ITSELF.search(now)
        return (gpus & used).pop() if alone else ""

    def with_fewest_edits(self, found: Explanation, error: Any) -> Explanation:
        """Return the explanation with the fewest repeated copies; among equals, fewest edits."""
        best, (copies, count) = self._completed(found)
        gpus = {device for each in found.operands for device in each.devices} - {"cpu"}
        until = time.monotonic() + _MOST * _LIMIT_S
        for here, gpu in product((False, True), ("", *sorted(gpus))):
            if count < 2 or time.monotonic() > until:
                break
            other = explain(error, namespace=self._namespace, target=gpu, here=here)
            if other and other.fix and (not found.fix or other.fix.code != found.fix.code):
                done, cost = self._completed(replace(other, first=found.first), gpu)
                if cost < (copies, count):
                    best, (copies, count) = done, cost
        return best

    def _completed(self, found: Explanation, target: str = "") -> tuple[Explanation, _Cost]:
        """Add fixes for later errors. Also return the numbers of repeated copies and of edits."""
        texts, every, fix, copies = dict(self._before), list[Fix](), found.fix, 0
        if fix is not None and not self._takes_effect(fix, texts):
            return found, (0, 1)
        while fix is not None and len(every) < _MOST and self._takes_effect(fix, texts):
            every.append(fix)
            copies += bool(fix.nbytes) and _is_repeated(fix, texts[fix.filename])
            texts[fix.filename] = fix.apply(texts[fix.filename])
            run = self._dry(self._from_change(texts), texts, target=target)
            if run.error:
                edited = range(fix.line, fix.line + len(fix.code.splitlines()))
                here = run.error_at is not None and run.error_at.line in edited
                if here and "has no attribute 'to'" in run.error and not every[1:]:
                    found = replace(found, fix=None)  # the edit moves a container
                break
            later = run.mismatches[0].explanation if run.mismatches else None
            fix = later.fix if later is not None else None
            # An edit of `__init__` ends the search, because a dry run cannot try such an edit.
            last = [fix] if fix and fix.cls and not self._takes_effect(fix, texts) else []
            if not run.mismatches or last:
                made = [_changes(self._before[name], texts[name], every, name) for name in texts]
                edits = [*chain.from_iterable(made)] if every[1:] else [every[0], *found.more]
                done = replace(found, fix=edits[0], more=(*edits[1:], *last))
                return done, (copies, len(every) + len(last))
        return found, (_MOST + 1, _MOST + 1)  # the code still fails

    def _takes_effect(self, fix: Fix, texts: dict[str, str]) -> bool:
        """Whether a dry run executes an edit: not if only earlier cells call the edited method."""
        nodes = ast.walk(ast.parse(texts.get(fix.filename, "")))
        functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
        around = [f.name for f in functions if f.lineno <= fix.line <= (f.end_lineno or 0)]
        called = {getattr(node, "attr", "") for node in ast.walk(ast.parse(self._top.source))}
        called |= {frame.code.co_name for frame in self._frames}
        runs = not fix.cls or bool(around and around[-1] in called - {"__init__"})
        return fix.filename in texts and runs and not fix.earlier

    def _from_change(self, texts: dict[str, str]) -> list[ast.stmt]:
        """Return the statements from the first one that failed or that the edits affect."""
        old = ast.parse(self._top.source).body
        new = ast.parse(texts[self._top.filename]).body
        names = {
            name
            for file, text in texts.items()
            for name in _changed_functions(self._before[file], text)
        }
        pairs = zip(old, new, strict=False)
        affected = (ast.dump(a) != ast.dump(b) or names & {*names_read(b)} for a, b in pairs)
        ran = sum((stmt.end_lineno or 0) < self._top.line for stmt in old)
        first = min(ran, next((n for n, each in enumerate(affected) if each), len(old)))
        return refilled(new, first)

    def _dry(
        self, code: list[ast.stmt], texts: dict[str, str], number: str = "", target: str = ""
    ) -> DryRun:
        file, tree, namespace = self._top.filename, ast.Module(code, []), self._namespace
        reads = variables_read(names_read(tree, self._transform), namespace) if number else ()
        # Search before the fork, because `gc` omits objects that the forked child has frozen.
        changed = dict[FunctionType, CodeType]()
        for name in (name for name, text in texts.items() if text != self._before[name]):
            changed |= functions_again(name, self._before[name], texts[name])

        def prepare(note: Note) -> Callable[[], dict[str, Any]]:
            execute = leave_out_magics(namespace, note, file, self._transform)
            for name, text in texts.items():
                linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
            for function, new in changed.items():
                function.__code__ = new

            return lambda: {"Out": execute(tree)}

        device, _ = target_of(f"cuda:{number}" if number else None)
        given = (namespace, [*reads], prepare, device, bool(number), _LIMIT_S, (), target, True)
        found = dry(Subject(*given, batches=_BATCHES))
        # Retry an error with all batches, because results of fewer batches may have a wrong shape.
        return dry(Subject(*given)) if found.error else found


def _changed_functions(before: str, after: str) -> set[str]:
    """Return the names of the functions that an edit changed."""
    trees = (ast.walk(ast.parse(text)) for text in (before, after))
    functions = [[n for n in tree if isinstance(n, ast.FunctionDef)] for tree in trees]
    return {a.name for a, b in zip(*functions, strict=False) if ast.dump(a) != ast.dump(b)}


def _is_repeated(fix: Fix, text: str) -> bool:
    """Whether a fix edits a function's or loop's body, which may run many times."""
    kinds = (ast.FunctionDef, ast.For, ast.While)
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))
    return any(node.lineno < fix.line <= (node.end_lineno or 0) for node in nodes)


def _changes(before: str, after: str, fixes: list[Fix], filename: str) -> list[Fix]:
    """Return the edits that turn `before` into `after`. Edits a few lines apart are joined."""
    old, new = before.splitlines(), after.splitlines()
    found = list[list[int]]()
    for tag, *span in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal" and found and span[0] - found[-1][1] <= NEAR // 4:
            found[-1][1::2] = span[1], span[3]
        elif tag != "equal":
            found.append(span)
    nbytes, made = total(fix.nbytes for fix in fixes), list[Fix]()
    for a, b, c, d in found:
        where, code = "before" if a == b else "replace", "\n".join(new[c:d])
        end, cls = max(b, a + 1), next((f.cls for f in fixes if f.filename == filename), "")
        made.append(Fix(code, where, a + 1, end, filename, label(filename), nbytes, cls))
    return made

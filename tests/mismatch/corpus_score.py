"""Score explanations over snippets: devices, the odd one, the reason, and fixes that run."""

from collections import defaultdict

from snippets import names_told, read, run

from gpumagic.dryrun.try_fix import try_fix
from gpumagic.mismatch.explainer import explain

BLIND = ["cross_device_held_out.txt", "cross_device_blind.txt", "cross_device_blind_2.txt"]
LATER = ["cross_device_later.txt", "cross_device_more.txt"]
HELD_OUT = [*BLIND, *LATER]
OTHERS = ["cross_device.txt", *LATER]


class Score:
    """Whether each snippet is explained as it must be, by what is asked of the explanation."""

    def __init__(self):
        self.right = defaultdict(int)
        self.missed = defaultdict(list)

    def note(self, what, is_right, snippet):
        self.right[what] += is_right
        if not is_right:
            self.missed[what].append(snippet.title)

    def share(self, what):
        return self.right[what] / (self.right[what] + len(self.missed[what]))

    def __str__(self):
        whats = dict.fromkeys([*self.right, *self.missed])
        return "\n".join(
            f"{what}: {self.right[what]} of {self.right[what] + len(self.missed[what])} "
            f"{self.missed[what]}"
            for what in whats
        )


def score(files):
    """Run each snippet, explain its error, and run it with the fix in it."""
    result = Score()
    for snippet in [snippet for file in files for snippet in read(file)]:
        error = run(snippet.code)
        before = _state(error)
        explanation = explain(error)
        result.note("the error is left alone", _state(error) == before, snippet)
        _note_words(result, explanation, snippet)
        fix = explanation.fix if explanation is not None else None
        fixed = fix is not None and run(fix.apply(snippet.code), "fixed.py") is None
        if fix is not None and not fixed:  # completed, as below a cell
            fixed = run(applied(try_fix(error, explanation), snippet.code), "fixed.py") is None
        if snippet.withheld:
            result.note("rightly withheld", fix is None or fixed, snippet)
        else:
            result.note("fix runs", fixed, snippet)
        if fix is not None and snippet.at:
            result.note("fix is at the line", fix.line == snippet.at, snippet)
    return result


def applied(explanation, code):
    """The code with all edits of an explanation, the last line first."""
    edits = [explanation.fix, *explanation.more]
    for fix in sorted(edits, key=lambda fix: -fix.line):
        code = fix.apply(code)
    return code


def _note_words(result, explanation, snippet):
    told = names_told(explanation) if explanation is not None else {}
    named = [n in told and device in told[n].devices for n, device in snippet.names.items()]
    wrong = [n for n, d in snippet.names.items() if n in told and d not in told[n].devices]
    result.note("devices", explanation is not None and all(named), snippet)
    result.note("nothing wrong is said", not wrong, snippet)
    if snippet.odd:
        odd = [name for name, operand in told.items() if operand.odd]
        starts = tuple(f"{snippet.odd}{end}" for end in (".", ""))
        result.note(
            "the odd one", any(n == starts[1] or n.startswith(starts[0]) for n in odd), snippet
        )
    if snippet.because:
        fix = explanation.fix if explanation is not None else None
        # Where the fix registers an attribute, the reason does not say so again.
        reason = f"{explanation and explanation.reason} {fix and fix.code}"
        result.note("the reason", snippet.because.lower() in reason.lower(), snippet)


def _state(error):
    return type(error), error.args, error.__traceback__, getattr(error, "__notes__", None)

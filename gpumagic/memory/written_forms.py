"""Find code with a drop-in replacement that needs less memory, such as attention written by hand.

A form is a pattern, such as `matmul(softmax(s, -1), v)`. A letter matches any expression. A call
also matches a name to which a statement assigned this call. `Form` is any replacement of code.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import permutations, product
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from gpumagic.usercode.frames import FailedFrame, RestOfCode, block_of, stored, uses
from gpumagic.usercode.values import MISSING, is_module, is_tensor, torch_here

_COSINES = "cosine_similarity(unsqueeze(x, 1), unsqueeze(y, 0), -1)"
_DISTANCES = {
    "sqrt(sum(pow({}, 2), -1))": "torch.cdist(x, y)",
    "sum(pow({}, 2), -1)": "torch.cdist(x, y).square()",
    "norm({}, -1)": "torch.cdist(x, y)",
}
_DIFFERENCES = {  # values: the number of dimensions of `x` and `y`
    "sub(unsqueeze(x, 1), unsqueeze(y, 0))": 2,
    "sub(unsqueeze(x, 1), y)": 2,
    "sub(unsqueeze(x, 2), unsqueeze(y, 1))": 3,
}
_SCALES = {"{}": "1.0", "mul({}, s)": "s", "div({}, s)": "1 / s"}
_MASKS = {"{}": "", "masked_fill({}, m, i)": ", attn_mask=~m", "add({}, m)": ", attn_mask=m"}
_DROPS = {"{}": "", "dropout({}, p)": ", dropout_p=p"}


def _forms() -> Iterator[tuple[str, str, int]]:
    """Yield each form, a replacement that needs less memory, and the dimensions of `x` and `y`."""
    yield "matmul(float(one_hot(t, n)), w)", "w[t]", 2
    yield "linear(float(one_hot(t, n)), w)", "F.embedding(t, w.weight.T) + w.bias", 2
    yield _COSINES, "F.normalize(x, dim=1) @ F.normalize(y, dim=1).T", 2
    for (distance, new), (difference, dims) in product(_DISTANCES.items(), _DIFFERENCES.items()):
        yield distance.format(difference), new, dims
    for (scaled, scale), (masked, mask), (dropped, drop) in product(
        _SCALES.items(), _MASKS.items(), _DROPS.items()
    ):
        scores = masked.format(scaled.format("matmul(q, transpose(k))"))
        given = f"q, k, v{mask}{drop}, scale={scale}"
        form = f"matmul({dropped.format(f'softmax({scores}, -1)')}, v)"
        yield form, f"F.scaled_dot_product_attention({given})", 2


_PARSED = [(ast.parse(form, mode="eval").body, new, dims) for form, new, dims in _forms()]
_MORE = {  # arguments that lower the memory of a call, by the function's name
    "load": 'map_location="cpu"',
    **dict.fromkeys(("vmap", "jacrev"), "chunk_size=16"),
    "backward": "retain_graph=False",
}
# Functions of each element that have a variant in place, such as `exp_`
_ELEMENTWISE = {"abs", "add", "clamp", "div", "exp", "log", "mul", "neg", "pow", "relu", "rsqrt"}
_ELEMENTWISE |= {"sigmoid", "sqrt", "sub", "tanh"}
_CALLS = {*["amax", "amin", "cdist", "matmul", "mean", "norm", "std", "unsqueeze"], *_ELEMENTWISE}
_CHECKPOINT = "torch.utils.checkpoint.checkpoint"
_MINUS_INFINITY = re.compile(r"inf|-1e|\.min$")
_OPERATORS = {"MatMult": "matmul", "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "div"}
_ALIKE = _OPERATORS | {"Pow": "pow", "T": "transpose", "mT": "transpose", "bmm": "matmul"}


class Form(NamedTuple):
    """Describe a replacement of statements in the user's code."""

    do: str  # advice for the user
    new: str  # code of the new statement
    old: list[ast.stmt]  # statements to replace; empty if only `uses` change
    block: list[ast.stmt]  # the list in the syntax tree that contains `old`
    uses: dict[ast.expr, ast.expr] = {}  # noqa: RUF012  maps further expressions to new ones

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the replacement into the syntax tree for the duration of a `with` block."""
        before = [*self.block]
        for each in before:
            Swap(self.uses.get).visit(each)
        for last in self.old[-1:]:
            new = ast.copy_location(ast.parse(self.new).body[0], last)
            kept = (each for each in before if each is last or each not in self.old)
            self.block[:] = [new if each is last else each for each in kept]
        try:
            yield
        finally:
            self.block[:] = before
            back = {new: old for old, new in self.uses.items()}
            for each in before:
                Swap(back.get).visit(each)


def forms(rest: RestOfCode, *, learns: bool) -> Iterator[Form]:
    """Yield replacements for the failed statement, and for later simple statements of its block.
    `learns` says whether a backward pass follows."""
    block: list[Any] = block_of(rest.failed) if rest.failed is not None else []
    first = block.index(rest.failed) if block else 0
    kinds = (ast.Assign, ast.Expr, ast.Return)
    simple = [at for at in range(first, len(block)) if isinstance(block[at], kinds)]
    nodes: list[tuple[int, Any]] = [(n, node) for n in simple for node in ast.walk(block[n])]
    for at, node in nodes:
        yield from _drop_in(rest.frame, block, at, node, first)
        reader = _Reader(rest.frame, block, at)
        for new in reader.with_less(node, in_place=not learns):
            yield from reader.replaced(node, new)


def _drop_in(
    frame: FailedFrame, block: list[Any], at: int, node: ast.expr, first: int
) -> Iterator[Form]:
    """Yield the first fitting form's replacement, if the match includes the failed statement."""
    for form, new, dims in _PARSED:
        reader = _Reader(frame, block, at)
        if reader.fits(form, node, at):
            if first in reader.used and reader.is_same(new, dims):
                yield from reader.replaced(node, reader.filled(new))
            return  # a later form may mistake `y.unsqueeze(0)` for `y`


def checkpointed(rest: RestOfCode) -> Iterator[Form]:
    """Yield the failed call of a module or of the user's function, with a checkpoint around it."""
    node: Any = rest.frame.failed
    block: list[Any] = block_of(rest.failed) if rest.failed is not None else []
    called = rest.frame.scope.value(node.func) if isinstance(node, ast.Call) and block else None
    theirs = isinstance(called, FunctionType) and not str(called.__module__).startswith("torch")
    if is_module(called) or theirs:
        how = [*node.keywords, ast.keyword("use_reentrant", ast.Constant(False))]
        new = ast.Call(expression(_CHECKPOINT), [node.func, *node.args], how)
        yield from _Reader(rest.frame, block, block.index(rest.failed)).replaced(node, new)


def one_shape(rest: RestOfCode, operands: list[Any]) -> Iterator[Form]:
    """Yield forms that give operands [N] and [N, 1] one shape, so that the result is not [N, N]."""
    failed = rest.failed or ast.Pass()
    names = dict.fromkeys(n.id for n in ast.walk(failed) if isinstance(n, ast.Name))
    for one, two in permutations(operands, 2):
        for name in names if _clash(one, two) else ():
            found = uses(failed, name)
            if found and rest.frame.scope.name(name) is one:
                code = f"{name}.view({', '.join(map(str, two.shape))})"
                shapes = f"{[*one.shape]} and {[*two.shape]} broadcast"
                do = f"`{code}` for `{name}`: {shapes} to {one.numel():,} × {two.numel():,}"
                new = {use: expression(code) for use in found}
                yield Form(do, "", [], block_of(failed), new)


def _clash(one: Any, two: Any) -> bool:
    """Whether operands [N] and [N, 1] broadcast by mistake. A view `x[:, None]` is intended."""
    column = max(one, two, key=lambda operand: operand.dim())
    alike = one.numel() == two.numel() and one.dim() != two.dim()
    return alike and column.shape[-1] == 1 and not column._is_view()


def expression(text: str) -> Any:
    return ast.parse(text, mode="eval").body


class Swap(ast.NodeTransformer):
    """Replace the nodes for which `change` returns a node."""

    def __init__(self, change: Callable[[Any], ast.AST | None]) -> None:
        self._change = change

    def visit(self, node: ast.AST) -> Any:
        return self._change(node) or self.generic_visit(node)


def advice(new: str, old: list[Any], block: list[Any]) -> str:
    """Return the advice to replace lines; other statements on these lines stay."""
    lines = [*dict.fromkeys(each.lineno for each in old)]
    around = getattr(old[-1], "parent", None)
    header = ""
    if isinstance(around, ast.stmt) and around.lineno in lines:  # as in `with no_grad(): y = f(x)`
        header = next(x for x in ast.unparse(around).splitlines() if x[0] != "@") + " "
    code = [new if each is old[-1] else ast.unparse(each) for each in block if each.lineno in lines]
    gone = {ast.unparse(each) for each in old[:-1]}
    numbers = f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}"
    return f"`{header}{'; '.join(each for each in code if each not in gone)}` for {numbers}"


def takes_rows(node: ast.AST) -> bool:
    """Whether code such as `x[:200]` selects rows of `x`. `x[:, 0]` and `x[None]` have all rows."""
    index = getattr(node, "slice", None)
    first = next(iter(getattr(index, "elts", ())), index)
    return first is not None and ast.unparse(first) not in (":", "None", "...")


def _unsqueezed(node: ast.Subscript) -> tuple[str, list[ast.expr]]:
    """Return ``"unsqueeze"`` and its operands for code such as `x[:9, None]`; else ``""``."""
    index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    slices, written = [n for n in index if isinstance(n, ast.Slice)], [*map(ast.unparse, index)]
    if written.count("None") != 1 or len(slices) < len(index) - 1:
        return "", []
    of = f"{ast.unparse(node.value)}[{', '.join(map(ast.unparse, slices))}]"
    whole = {*written} <= {"None", ":"}
    value = node.value if whole else expression(of)
    return "unsqueeze", [value, ast.Constant(written.index("None"))]


def _alike(name: str, given: list[Any], words: Mapping[Any, Any]) -> tuple[str, list[ast.expr]]:
    """Return a call's name and arguments as the forms write them."""
    if name == "dropout" and "training" in words:
        p = [*given, ast.Constant(0.5)][1]
        return name, [given[0], ast.BinOp(p, ast.Mult(), words["training"])]
    if name == "square":
        return "pow", [*given, ast.Constant(2)]
    if name == "norm" and "dim" not in words:
        return "", []  # without `dim=`, the argument after the tensor is the order of the norm
    # Assume that `transpose` swaps the last two dimensions, as in attention.
    return _ALIKE.get(name, name), given[:1] if name == "transpose" else given


class _Reader:
    """Match an expression against a form, and write the form's replacement."""

    def __init__(self, frame: FailedFrame, block: list[Any], at: int) -> None:
        self._frame, self._block, self._at = frame, block, at
        self.used = {at}
        self._found: dict[str, tuple[ast.expr, int]] = {}  # expression and statement, by letter
        self._last = set[str]()  # arguments in the code that matched `-1` in the form

    def fits(self, form: Any, node: ast.expr, at: int) -> bool:
        """Whether an expression in statement `at` matches a form. Record each letter's match."""
        if isinstance(form, ast.Name):
            known, _ = self._found.setdefault(form.id, (node, at))
            is_meant = form.id != "i" or _MINUS_INFINITY.search(ast.unparse(node)) is not None
            return is_meant and ast.dump(known) == ast.dump(node)
        if not isinstance(form, ast.Call):
            self._last |= {ast.unparse(node)} if ast.unparse(form) == "-1" else set()
            return ast.unparse(form) in ("-1", ast.unparse(node))
        name, args, at = self.call(node, at)
        alike = name == getattr(form.func, "id", "") and len(args) == len(form.args)
        return alike and all(self.fits(*each, at) for each in zip(form.args, args, strict=True))

    def is_same(self, new: str, rank: int) -> bool:
        """Whether a replacement gives the same result for the operands' shapes and dtypes."""
        known = {letter: self._frame.scope.value(node) for letter, (node, _) in self._found.items()}
        tensors = {letter: value for letter, value in known.items() if is_tensor(value)}
        if "attn_mask=m" in new and not ("m" in tensors and tensors["m"].is_floating_point()):
            return False  # a boolean `attn_mask` selects scores, and is not added to them
        dims = {letter: tensor.dim() for letter, tensor in tensors.items()}
        last = rank if "(x, " in new else dims.get("q", 0) - 1
        alike = {dims.get("x", rank), dims.get("y", rank)} == {rank}
        return alike and self._last <= {"-1", str(last)}

    def call(self, node: Any, at: int) -> tuple[str, list[ast.expr], int]:
        """Return an operation's name, operands and statement. Follow a variable's assignment."""
        if isinstance(node, ast.Name):
            made = next((n for n in reversed(range(at)) if node.id in stored(self._block[n])), at)
            if isinstance(getattr(self._block[made], "targets", [None])[0], ast.Name) and made < at:
                self.used.add(made)
                return self.call(self._block[made].value, made)
        elif isinstance(node, ast.BinOp):
            return _ALIKE.get(type(node.op).__name__, ""), [node.left, node.right], at
        elif isinstance(node, ast.Attribute):
            return _ALIKE.get(node.attr, ""), [node.value], at
        elif isinstance(node, ast.Subscript):
            return *_unsqueezed(node), at
        elif isinstance(node, ast.Call):
            return *self._called(node), at
        return "", [], at

    def _called(self, node: ast.Call) -> tuple[str, list[ast.expr]]:
        """Return a function's name and arguments. The object of a method is the first argument."""
        words = {key.arg: key.value for key in node.keywords}
        given = [*node.args, *(value for name, value in words.items() if name != "training")]
        value, owner = self._frame.scope.value(node.func), getattr(node.func, "value", None)
        if is_module(value):
            name, text = type(value).__name__.lower(), ast.unparse(node.func)
            name = "" if name == "linear" and type(value) is not torch_here().nn.Linear else name
            settings = {"dropout": f"{text}.p * {text}.training", "linear": text}
            setting = settings.get(name, str(getattr(value, "dim", None)))
            return name, [*given, expression(setting)]
        is_torchs = (getattr(value, "__module__", None) or "torch").startswith("torch")
        if not is_torchs and value is not MISSING:
            return "", []
        if owner is not None and not isinstance(self._frame.scope.value(owner), ModuleType):
            given.insert(0, owner)
        return _alike(getattr(node.func, "attr", getattr(node.func, "id", "")), given, words)

    def with_less(self, node: Any, *, in_place: bool) -> Iterator[ast.expr]:
        """Yield an expression that reuses memory, or a call with an argument of `_MORE`."""
        new, _ = self._in_place(node) if in_place else (node, False)
        if new is not node and not isinstance(getattr(node, "parent", None), ast.BinOp):
            yield new
        if isinstance(node, ast.Call) and (more := _MORE.get(self.call(node, self._at)[0])):
            (word,) = expression(f"f({more})").keywords
            given = [each for each in node.keywords if each.arg != word.arg]
            yield ast.Call(node.func, node.args, [*given, word])

    def _in_place(self, node: Any) -> tuple[Any, bool]:
        """Return code that overwrites unnamed results, and whether its own may be overwritten."""
        name, given, _ = ("", [], 0) if isinstance(node, ast.Name) else self.call(node, self._at)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            name, given = "neg", [node.operand]
        if name not in _ELEMENTWISE or not self._may_overwrite(node):
            return node, name in ("matmul", "cdist") and self._may_overwrite(node)
        for at, each in enumerate(given[: 2 if name in ("add", "mul") else 1]):
            new, unnamed = self._in_place(each)
            if unnamed:
                others = [*given[:at], *given[at + 1 :]]
                return ast.Call(ast.Attribute(new, f"{name}_", ast.Load()), others, []), True
        return node, True

    def _may_overwrite(self, node: ast.AST) -> bool:
        """Whether the code's results may be overwritten. All tensors must have one floating dtype.
        None may require a gradient, because a backward pass could read the results."""
        nodes = [*ast.walk(node)]
        tensors = [t for t in map(self._frame.scope.value, nodes) if is_tensor(t)]
        calls = [each for each in nodes if isinstance(each, ast.Call)]
        plain = all(ast.unparse(c.func).split(".")[-1] in _CALLS and not c.keywords for c in calls)
        dtypes = {t.dtype for t in tensors if t.is_floating_point() and not t.requires_grad}
        return plain and len(dtypes) == 1 and dtypes == {t.dtype for t in tensors}

    def filled(self, new: str) -> Any:
        """Return the replacement `new` with the matched expressions in place of the letters."""
        known = {letter: node for letter, (node, _) in self._found.items()}
        is_there = getattr(self._frame.scope.name("F"), "__name__", "") == "torch.nn.functional"
        text = new if is_there else new.replace("F.", "torch.nn.functional.")
        query = self._frame.scope.value(known.get("q", ast.Pass()))
        if is_tensor(query) and query.dim() == 3:  # fused attention kernels require four dimensions
            text = text.replace("(q, k, v", "(q[None], k[None], v[None]") + "[0]"
        filled = Swap(lambda n: known.get(getattr(n, "id", ""))).visit(expression(text))
        return expression(ast.unparse(filled).replace("~~", ""))

    def replaced(self, node: ast.expr, new: ast.expr) -> Iterator[Form]:
        """Yield a `Form` that replaces `node` by `new`, unless a matched name has been rebound."""
        for read, at in self._found.values():
            names = {each.id for each in ast.walk(read) if isinstance(each, ast.Name)}
            if any(names & stored(self._block[n]) for n in range(at, self._at)):
                return
        statement = self._block[self._at]
        text = ast.unparse(Swap({node: new}.get).visit(statement))
        Swap({new: node}.get).visit(statement)
        used = [self._block[n] for n in sorted(self.used)]
        tree = self._frame.tree or statement
        old = [each for each in used if each is statement or not self._is_read(each, used, tree)]
        yield Form(advice(text, old, self._block), text, old, self._block)

    def _is_read(self, made: ast.stmt, used: list[ast.stmt], within: ast.AST) -> bool:
        """Whether statements other than `used` read a name that `made` binds."""
        inside, names = {id(node) for each in used for node in ast.walk(each)}, stored(made)
        nodes = (node for node in ast.walk(within) if id(node) not in inside)
        read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        return bool(names & read)

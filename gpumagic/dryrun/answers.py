"""Answer torch calls that need a tensor's data, in a torch function mode of a dry run.

Real tensors that the code reaches become fakes (tensors without data). Numbers that depend on data
become `NotKnown`, or end the dry run. The forked child replaces functions that fail on fakes.
"""

import math
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch._meta_registrations
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._tensor_str import PRINT_OPTS
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import DataLoader, _SingleProcessDataLoaderIter

from gpumagic.dryrun.count_operators import Crossings
from gpumagic.dryrun.fakes import NotKnown, Stopped, host_value, is_real, refusing, suspended
from gpumagic.dryrun.held_memory import HeldMemory
from gpumagic.dryrun.result import GUESSED
from gpumagic.ledger.entry import PRINT
from gpumagic.usercode.files import UserLine, expression, in_cell, is_users, line_at, user_frame


class Calls(TorchFunctionMode):
    """Answer calls that need data. The function `fake` turns a real tensor into a fake, in place.
    Unless `guesses` is None, most numbers that code reads from tensors become 1, and conditions on
    tensors become False. The function `guesses` reports conditions in the user's code."""

    def __init__(
        self, fake: Callable[[Tensor], object], crossings: Crossings, guesses: Any
    ) -> None:
        super().__init__()
        self._fake, self._crossings, self._guesses = fake, crossings, guesses

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self._ready(func, (args, kwargs or {}))
        if (answer := _ANSWERS.get(func)) and args and isinstance(args[0], FakeTensor):
            return answer(self, func, args, kwargs, sys._getframe(1))
        # A method of a storage may need real tensors, so suspend fakes during the call.
        of_storage = bool(args) and isinstance(args[0], torch.UntypedStorage)
        with suspended() if of_storage else nullcontext():
            out = func(*args, **kwargs)
        if isinstance(out, Tensor) and is_real(out):
            self._fake(out)
        return out

    def _ready(self, func: Any, given: Any) -> Any:
        """Turn real tensors into fakes. Replace unknown numbers by 1 or NaN, or end the dry run."""
        leaves = tree_leaves(given)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and is_real(leaf):
                self._fake(leaf)
        if NotKnown not in map(type, leaves):
            return given
        name = getattr(func, "__name__", str(func))
        # The first argument of `full`, the size, must be known. The fill value may be unknown.
        sizes = tree_leaves([given[0][:1], given[1].get("size")]) if name == "full" else leaves
        unknown = next((leaf for leaf in sizes if type(leaf) is NotKnown), None)
        if unknown is not None and name.strip("_") not in _SCALES:
            raise Stopped(f"{name} with {unknown.what} depends on data")
        return tree_map_only(NotKnown, lambda item: 1 if item.whole else math.nan, given)

    def copied(self, func: Any, args: Any, kwargs: Any, frame: Any) -> Any:
        tensor, memo = args
        if not tensor.is_leaf or id(tensor) in memo:
            with torch._C.DisableTorchFunction():
                return func(tensor, memo)
        data = tensor.detach().clone(memory_format=torch.preserve_format)  # omits the gradient
        is_parameter, learns = isinstance(tensor, nn.Parameter), tensor.requires_grad
        memo[id(tensor)] = nn.Parameter(data, learns) if is_parameter else data
        return memo[id(tensor)].requires_grad_(learns)

    def item(self, func: Any, args: Any, kwargs: Any, frame: Any) -> Any:
        tensor, name = args[0], _NAMES[func]
        self._crossings.note(False, "item", str(tensor.device), "cpu", tensor.element_size())
        value = host_value(frame)
        if tensor.constant is not None or tensor.numel() != 1:
            with torch._C.DisableTorchFunction():  # returns the value, or raises torch's error
                return func(tensor if tensor.constant is None else tensor.constant, *args[1:])
        if value is not None:
            return _KINDS.get(name, type(value))(value)
        known = name in ("float", "int", "index") or (name == "item" and tensor.is_floating_point())
        if self._guesses and (known or not is_users(frame.f_code.co_filename)):
            kind = _KINDS.get(name, (int, float)[tensor.is_floating_point()])
            return kind(name != "bool")  # a library's `if bad.any()` is False
        if self._guesses and name == "bool":
            self._guesses(GUESSED)
            return False
        if name == "item":
            return NotKnown(".item()", whole=torch.can_cast(tensor.dtype, torch.int64))
        words = {"bool": "a condition on a tensor", "index": "a tensor as a size or an index"}
        raise Stopped(f"{words.get(name, f'{name}() of a tensor')} depends on data")

    def list_of(self, tensor: Any, frame: Any) -> Any:
        self._crossings.note(True, "copy_", str(tensor.device), "cpu", tensor.nbytes)
        if tensor.constant is not None:
            with torch._C.DisableTorchFunction():
                return tensor.constant.tolist()
        if host_value(frame) is not None:  # for a data loader's sampler, any order is valid
            return list(range(tensor.numel()))
        one = 1.0 if tensor.is_floating_point() else 1
        return _nested(tensor.shape, one if self._guesses else NotKnown("an element of a list"))

    def shown(self, func: Any, args: Any, kwargs: Any, frame: Any) -> str:
        tensor = args[0]
        # torch prints all elements of a small tensor, and the outer elements of a large tensor.
        edges = None if tensor.numel() <= PRINT_OPTS.threshold else 2 * PRINT_OPTS.edgeitems
        read = math.prod(min(n, edges or n) for n in tensor.shape) * tensor.element_size()
        self._crossings.note(False, "item", str(tensor.device), "cpu", read, how=PRINT)
        if _NAMES[func] == "format" and tensor.dim() == 0:
            return "?"
        where = "" if tensor.device.type == "cpu" else f", device='{tensor.device}'"
        return f"tensor(?, shape={tuple(tensor.shape)}{where}, dtype={tensor.dtype})"

    def numpy(self, func: Any, args: Any, kwargs: Any, frame: Any) -> Any:
        tensor, force = args[0], kwargs.get("force")
        if tensor.device.type != "cpu" and not force:
            cure = "Use Tensor.cpu() to copy the tensor to host memory first."
            raise TypeError(f"can't convert {tensor.device} device type tensor to numpy. {cure}")
        if tensor.requires_grad and not force:
            with suspended():
                torch.empty(0, requires_grad=True).numpy()  # raises torch's own error
        if self._guesses:
            with suspended():  # all positions share one element
                return torch.ones((), dtype=tensor.dtype).expand(tensor.shape).numpy()
        raise Stopped("a NumPy array of a tensor depends on data")

    def wait(self, device: Any = None) -> None:
        """Count a wait in place of `torch.cuda.synchronize`."""
        self._crossings.note(False, "synchronize", _named(device), "cpu", 0)

    def contents(self, func: Any, args: Any, kwargs: Any, frame: Any) -> Any:
        raise Stopped(f"{_NAMES[func]}() of a tensor depends on data")


class DataOnHost(TorchFunctionMode):
    """Try the code with its data on the CPU. Parts of the data move to the GPU when read.

    Data are the tensors in `held`, and some tensors that the code would move to the GPU: those of
    at least `least` bytes, and those moved at a line in `at` (a file and a range of lines).
    """

    def __init__(self, held: list[Tensor], at: tuple[str, range], least: int, note: Any) -> None:
        super().__init__()
        self._at, self._least, self._note = at, least, note
        # By id: tensor, bytes of the whole data, line that read it as a part (or None), target GPU.
        self._known: dict[int, tuple[Tensor, int, UserLine | None, Any]] = {}
        for each in held:
            self._known[id(each)] = each, each.nbytes, None, each.device
            for tensor in (each, each._base):  # a view keeps its base alive
                if tensor is not None:
                    tensor.data = tensor.data.cpu()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        known = [self._known[id(leaf)] for leaf in leaves if id(leaf) in self._known]
        if (kept := self._left_on_cpu(func, args, kwargs)) is not None:
            return kept
        if not known:
            return func(*args, **kwargs)
        on_gpu = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)
        if func is Tensor.__getitem__:
            args = args[0], tree_map_only(Tensor, Tensor.cpu, args[1])
        elif on_gpu:
            args, kwargs = tree_map_only(Tensor, self._moved, (args, kwargs))
        out = func(*args, **kwargs)
        self._record(func, out, *known[0], on_gpu=on_gpu)
        # Parts in a tuple, as from `split`, do not move now. A part moves when a GPU call uses it.
        at_once = func is torch.stack or is_users(sys._getframe(1).f_code.co_filename)
        return self._moved(out) if at_once and isinstance(out, Tensor) else out

    def _record(
        self, func: Any, out: Any, data: Tensor, whole: int, part: Any, device: Any, *, on_gpu: bool
    ) -> None:
        """Record each result of a call on data, either as data or as a part that must move."""
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not leaf.is_cuda:
                is_view = leaf.untyped_storage()._cdata == data.untyped_storage()._cdata
                if part is None and not is_view and func not in _READS:
                    self._note(WHOLE, None)
                elif part is None and leaf.nbytes * _PARTS_OF_DATA <= whole:
                    part = _expression(".cpu()" * on_gpu)
                self._known[id(leaf)] = leaf, whole, part, device

    def _left_on_cpu(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """If a call would move data to the GPU, return the data on the CPU instead; else None."""
        data, device, dtype = _moving(func, args, kwargs)
        if "cuda" not in str(device) or data.is_cuda or data.requires_grad:
            return None
        line = _expression()
        here = line is not None and line.file == self._at[0] and line.line in self._at[1]
        if not (here or data.nbytes >= self._least) or isinstance(data, nn.Parameter):
            return None
        self._note(MOVED, line)
        kept: Tensor = data.to(dtype or data.dtype)
        self._known[id(kept)] = kept, kept.nbytes, None, device
        return kept

    def _moved(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the GPU if it is a part of the data; else return it unchanged."""
        _, _, part, device = self._known.get(id(tensor), (tensor, 0, None, None))
        if part is None:
            return tensor
        self._note(PART, part)
        return tensor.to(device)


def _moving(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return the data, the device and the dtype of a call that may move data."""
    data: Any = args[0] if args else None
    if func in (torch.tensor, torch.as_tensor) and "cuda" in str(kwargs.get("device")):
        return func(*args, **kwargs | {"device": "cpu"}), kwargs["device"], None
    if func is Tensor.to and isinstance(data, Tensor):
        return data, *torch._C._nn._parse_to(*args[1:], **kwargs)[:2]
    return data, "cuda" if func is Tensor.cuda else None, None


MOVED, PART, WHOLE = "moved whole", "read in part", "computed from as a whole"
_READS = (Tensor.__getitem__, torch.index_select, Tensor.index_select, torch.stack)
_PARTS_OF_DATA = 4  # a part has at most one fourth of the data's bytes


def _expression(index: str = "") -> UserLine | None:
    """Return the user's line, cut to the running expression; insert `index` before a final `]`."""
    if (frame := user_frame(sys._getframe(1))) is None:
        return None
    line, text = line_at(*in_cell(frame)), expression(*in_cell(frame))
    text = f"{text[:-1]}{index}]" if text.endswith("]") and "," not in text else text
    return line if text.startswith("for ") else replace(line, source=text)


_KINDS = {"int": int, "index": int, "bool": bool, "float": float}
_SCALES = {  # functions that use a number neither as a size nor as an index
    *("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod"),
    *("pow", "radd", "iadd", "isub", "rmul", "imul", "truediv", "rtruediv", "idiv", "itruediv"),
    *("floordiv", "rdiv", "mod", "rpow", "ipow", "lt", "le", "gt", "ge", "eq", "ne", "fill"),
    *("rfloordiv", "ifloordiv", "rmod", "imod"),
    *("clamp", "clip", "clamp_min", "clamp_max", "where", "masked_fill", "lerp", "addcmul"),
    *("addcdiv", "tensor", "as_tensor", "full_like", "maximum", "minimum", "setitem"),
    *("multiply", "divide", "subtract", "add_scalar", "atan2", "copysign", "xlogy"),
}


def _nested(shape: Any, item: Any) -> Any:
    return [_nested(shape[1:], item) for _ in range(shape[0])] if shape else item


def _set_data(tensor: Any, new: Any) -> None:
    """Run `tensor.data = new` for fakes; torch itself would keep the old device."""
    with torch._C.DisableTorchFunction():
        torch.Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]
        tensor.fake_device = new.fake_device
        tensor.constant = None


_BY_NAME: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("item", "__bool__", "__float__", "__int__", "__index__"), Calls.item),
    **dict.fromkeys(("__repr__", "__str__", "__format__"), Calls.shown),
    **dict.fromkeys(("numpy", "__array__"), Calls.numpy),
    "__deepcopy__": Calls.copied,
    **dict.fromkeys(("__reduce_ex__", "__dlpack__", "data_ptr"), Calls.contents),
    "tolist": lambda calls, func, args, kwargs, frame: calls.list_of(args[0], frame),
    "pin_memory": lambda calls, func, args, kwargs, frame: args[0].clone(),
    "is_pinned": lambda calls, func, args, kwargs, frame: False,
    "share_memory_": lambda calls, func, args, kwargs, frame: args[0],
}
_ANSWERS = {getattr(Tensor, name): answer for name, answer in _BY_NAME.items()}
_NAMES = {getattr(Tensor, name): name.strip("_") for name in _BY_NAME}
_ANSWERS[Tensor.data.__set__] = lambda calls, func, args, *_: _set_data(*args)  # type: ignore[attr-defined]


def install(
    calls: Calls,
    note: Callable[[str], object],
    held: HeldMemory,
    virtual: bool,
    batches: int | None,
) -> None:
    """Replace functions that fail on fakes, until this forked child ends."""

    def left_out(name: str) -> Callable[..., object]:
        return lambda *args, **kwargs: note(f"{name} was skipped")

    def compiled(model: Any = None, **options: Any) -> Any:
        note("torch.compile was skipped: its memory savings are not counted")
        return model if model is not None else (lambda function: function)

    def not_known(device: Any = None) -> NotKnown:
        return NotKnown("a peak of memory", whole=True)

    def allocated(device: Any = None) -> int:
        return held.now.get(_named(device), 0)

    lazy = refusing("a dry run cannot follow a lazy module: its shapes are not known yet")
    replaced: list[tuple[Any, str, Any]] = [
        (fake_tensor, "init_gpu_context", lambda *device: None),
        (FakeTensor, "tolist", lambda self: calls.list_of(self, sys._getframe(1))),
        # `Module.to` and similar methods call `swap_tensors`, which fails for fake parameters.
        (torch.utils, "swap_tensors", _set_data),
        *((kind, "__new__", lazy) for kind in (UninitializedParameter, UninitializedBuffer)),
        (DataLoader, "_get_iterator", lambda loader: _in_this_process(loader, batches)),
        (os, "mkdir", left_out("making a folder")),  # a later write to the folder ends the dry run
        (torch, "save", left_out("torch.save")),
        (torch, "compile", compiled),
        (torch.cuda, "synchronize", calls.wait),
        (torch.cuda, "memory_allocated", allocated),
        (torch.cuda, "memory_reserved", allocated),
        # The peak is unknown, because the code may have reset it.
        *((torch.cuda, f"max_memory_{kind}", not_known) for kind in ("allocated", "reserved")),
        # In a function mode this function would return True, and torch would skip its fused layers.
        (torch.overrides, "has_torch_function", lambda *arguments: False),
    ]
    if virtual:
        # Virtual GPUs run the CPU's kernels, whose temporary tensors differ from CUDA's.
        replaced.append((torch._meta_registrations, "device_hint", lambda tensor: "cpu"))
    if accelerate := sys.modules.get("accelerate"):  # one process needs no padding
        alone = lambda self, tensor, *args, **kwargs: tensor  # noqa: E731
        replaced.append((accelerate.Accelerator, "pad_across_processes", alone))
    for owner, name, value in replaced:
        setattr(owner, name, value)
    # Run compiled functions eagerly. In a dry run, Dynamo would raise an error for fullgraph=True.
    torch.compiler.set_stance("force_eager")
    for module in (optimizers, _foreach_utils):
        # Optimizers update all tensors at once only if the tensors' types are in this list.
        module._foreach_supported_types.append(FakeTensor)


def _named(device: Any) -> str:
    return f"cuda:{torch.cuda._utils._get_device_index(device, optional=True)}"


def _in_this_process(loader: Any, batches: int | None) -> Any:
    """Iterate over a DataLoader's first batches in this process, reading some samples of each."""
    vars(loader).update(num_workers=0, pin_memory=False, prefetch_factor=None, timeout=0)
    iterator = _SingleProcessDataLoaderIter(loader)
    fetcher: Any = iterator._dataset_fetcher
    collate, fetch = fetcher.collate_fn, fetcher.fetch
    most = 64  # maximum number of samples read for a batch; a larger batch repeats samples

    def fetch_some(indices: Any) -> Any:
        def fill(samples: list[Any]) -> Any:
            again = (samples[n % most] for n in range(most, len(indices)))
            return collate([*samples, *(s if isinstance(s, Tensor) else copy(s) for s in again)])

        fetcher.collate_fn = fill
        return fetch(indices[:most])

    if isinstance(fetcher, _MapDatasetFetcher) and fetcher.auto_collation:
        vars(fetcher).update(fetch=fetch_some)
    return iterator if batches is None else islice(iterator, batches)

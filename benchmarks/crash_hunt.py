"""Look for what kills the process: every operator and public function, run on a virtual GPU.

    python benchmarks/crash_hunt.py [--sample N] [--verbose]

Meant for a build of PyTorch for CUDA on a machine without a GPU (pip's default on Linux), where a
path that is not intercepted ends in a kernel of CUDA. All runs in forked children: every OpInfo in
five types, forward and backward, and every public function of torch, Tensor, torch.nn.functional,
fft, linalg, special, signal, cuda, accelerator, and torchvision.ops with arguments of many kinds.
What a call raises does not matter, unless it comes from CUDA. Prints a table and what was found.
Ends with 1 if anything killed its process or reached CUDA. One entry is late: `Tensor.index` of 0.5
never ends, on any device.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

MODULES = (
    "torch",
    "torch.Tensor",
    "torch.nn.functional",
    "torch.fft",
    "torch.linalg",
    "torch.special",
    "torch.signal.windows",
    "torch.cuda",
    "torch.accelerator",
    "torchvision.ops",
)
DTYPES = ("float32", "float16", "int64", "bool", "complex64")
SAMPLES = 3
TOGETHER = 40
"""How many entries share a child, until one of them dies."""
LIMIT_S = 120
REACHED = re.compile(
    r"NVIDIA driver|CUDA driver|NVRTC|DispatchStub|current_cuda_stream|libcuda|no CUDA-capable|"
    r"CUBLAS|CUDNN|cuDNN error|CUSOLVER|CUFFT|CUSPARSE|without USE_CUDA"
)
_DEVICE = "cuda:1"


def entries() -> list[tuple[str, str]]:
    """What there is to run: a group and a name."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = [("OpInfo", str(place)) for place in range(len(op_db))]
    for module in MODULES:
        if importlib.util.find_spec(module.split(".")[0]) is not None:
            found += [(module, name) for name in _functions(module)]
    return found


def _functions(module: str) -> list[str]:
    owner = _owner(module)
    public = {n for n in getattr(owner, "__all__", dir(owner)) if not n.startswith("_")}
    if module.startswith("torch."):
        public |= {n for n in dir(owner) if not n.startswith("_")}
    functions = (n for n in public if callable(getattr(owner, n, None)))
    return sorted(n for n in functions if not inspect.isclass(getattr(owner, n)))


def _owner(module: str) -> Any:
    if module == "torch.Tensor":
        return importlib.import_module("torch").Tensor
    return importlib.import_module(module)


def calls(group: str, name: str) -> Iterator[Callable[[], Any]]:
    """The calls of one entry."""
    yield from _of_opinfo(int(name)) if group == "OpInfo" else _of_function(group, name)


def _of_opinfo(place: int) -> Iterator[Callable[[], Any]]:
    import torch
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.utils._pytree import tree_leaves

    op = op_db[place]

    def run(sample: Any) -> None:
        out = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
        tracked = [t for t in out if isinstance(t, torch.Tensor) and t.requires_grad]
        if tracked:
            sum((t.abs() if t.is_complex() else t).sum() for t in tracked).backward()

    for dtype in (getattr(torch, name) for name in DTYPES):
        backward = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        samples = iter(op.sample_inputs(_DEVICE, dtype, requires_grad=backward))
        with contextlib.suppress(Exception):  # samples are not made for every type
            for sample in itertools.islice(samples, SAMPLES):
                yield lambda sample=sample: run(sample)


def _of_function(group: str, name: str) -> Iterator[Callable[[], Any]]:
    import torch

    function = getattr(_owner(group), name)
    there: dict[str, Any] = {"device": _DEVICE}
    some = torch.arange(1.0, 17.0, device=_DEVICE)
    tensors = [some, some.view(4, 4), some.view(1, 4, 4), some.view(1, 1, 4, 4), some[0], some[:0]]
    tensors += [some.view(4, 4).to(getattr(torch, dtype)) for dtype in DTYPES[1:]]
    yield _by_name(function)
    for n in (1, 4):
        yield lambda n=n: function(n, **there)
        yield lambda n=n: function(n, n, **there)
        yield lambda n=n: function(0, n, n, **there)
    for x in tensors:
        x = x.clone().requires_grad_(x.is_floating_point()).clone()  # no leaf: for add_ and its kin
        index = torch.zeros_like(x, dtype=torch.int64)
        last: list[tuple[Any, ...]] = [
            (),
            (x,),
            (x, x),
            (x, x, x),
            (index,),
            (0, index),
            (0, index, x),
        ]
        last += [(0,), (1,), (2, 2), (0.5,), ((2, 2),), ([x, x],), (0, 1), (torch.float64,)]
        last += [
            (torch.ones_like(x, dtype=torch.bool),),
            (x.detach().cpu(),),
            (x, x, x, x),
            (x, x, x, x, x),
        ]
        for rest in last:
            yield lambda x=x, rest=rest: function(x, *rest)
        yield lambda x=x: function([x, x])
        yield lambda x=x: function("ii->i", x)
        yield lambda x=x: function(x, **there)


def _by_name(function: Callable[..., Any]) -> Callable[[], Any]:
    """A call that fits its parameters by their names, as those of torchvision want it."""
    import torch

    boxes = torch.tensor([[0.0, 0, 2, 2], [1, 1, 3, 3]], device=_DEVICE)
    image = torch.arange(32.0, device=_DEVICE).view(1, 2, 4, 4)
    fitting: dict[str, Any] = dict.fromkeys(("boxes", "boxes1", "boxes2"), boxes)
    fitting |= {"scores": boxes[:, 0], "iou_threshold": 0.5, "min_size": 1.0, "size": (4, 4)}
    fitting |= {"idxs": boxes[:, 0].long(), "masks": image[0] > 3, "in_fmt": "xyxy", "p": 0.5}
    fitting |= {"out_fmt": "cxcywh", "block_size": 1, "mode": "row", "output_size": 2}
    fitting |= {"offset": image.new_zeros(1, 18, 2, 2), "weight": image.new_ones(3, 2, 3, 3)}
    fitting |= {"inputs": image, "targets": image, "input": image, "x": [image, image]}
    if "roi" in function.__name__:
        image, boxes = image.repeat(1, 2, 1, 1), torch.cat([boxes[:, :1] * 0, boxes], 1)
        fitting |= {"input": image, "boxes": boxes}

    def call() -> Any:
        parameters = inspect.signature(function).parameters.values()
        return function(**{p.name: fitting[p.name] for p in parameters if p.default is p.empty})

    return call


def hunt(todo: list[tuple[str, str]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Run entries; the group, the name and what came of it, for each."""
    while todo:
        done = 0
        for done, result in enumerate(_child(todo[:TOGETHER]), start=1):
            yield *todo[done - 1], result
        todo = todo[done:]


def _child(batch: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """What the entries give, one after another, up to the first that dies."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        with os.fdopen(writer, "w") as out:
            _work(batch, out)
        os._exit(0)
    os.close(writer)
    count = 0
    with os.fdopen(reader) as lines:
        for line in lines:
            count += 1
            yield json.loads(line)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if count < len(batch):
        late = code == -signal.SIGALRM
        yield {"late": 1} if late else {"killed": 1, "said": f"exit code {code}"}


def _work(batch: list[tuple[str, str]], out: Any) -> None:
    from gpumagic import virtual

    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    virtual.enable(2, 2**32)
    for group, name in batch:
        signal.alarm(LIMIT_S)
        result: collections.Counter[str] = collections.Counter()
        said = ""
        for call in calls(group, name):
            try:
                call()
                result["returned"] += 1
            except BaseException as error:  # noqa: BLE001 (what they raise is theirs)
                result["raised"] += 1
                if REACHED.search(str(error)):
                    result["reached"] += 1
                    said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        print(json.dumps({**result, "said": said}), file=out, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run, print, and judge."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sample", type=int, metavar="N", help="about N entries, evenly spread")
    parser.add_argument("--verbose", action="store_true", help="name each entry as it ends")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the other threads would not live on in a child
    todo = entries()
    todo = todo[:: max(len(todo) // (options.sample or len(todo)), 1)]
    kinds = ("entries", "returned", "raised", "late", "reached", "killed")
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # some functions write files
        for group, name, result in hunt(todo):
            said = result.pop("said", "")
            table[group].update(result | {"entries": 1})
            if options.verbose or result.keys() & {"late", "reached", "killed"}:
                print("  ", group, _title(group, name), result, said, flush=True)
    print(f"PyTorch {torch.__version__}\n{'':22}" + "".join(f"{kind:>10}" for kind in kinds))
    for group, counts in table.items():
        print(f"{group:22}" + "".join(f"{counts[kind]:10}" for kind in kinds))
    return int(any(counts["reached"] or counts["killed"] for counts in table.values()))


def _title(group: str, name: str) -> str:
    if group != "OpInfo":
        return name
    from torch.testing._internal.common_methods_invocations import op_db

    op = op_db[int(name)]
    return f"{op.name} {op.variant_test_name}".strip()


if __name__ == "__main__":
    sys.exit(main())

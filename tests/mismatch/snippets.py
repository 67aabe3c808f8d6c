"""Failing snippets and how they are run: from tests/data, each with what must be said of it."""

import io
import linecache
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

DATA = Path(__file__).parents[1] / "data"
_GIVEN = {
    "torch": torch,
    "nn": nn,
    "F": F,
    "np": np,
    "DataLoader": DataLoader,
    "TensorDataset": TensorDataset,
}


class Snippet:
    """One snippet: `code`, and `names` (name → device), `odd`, `because` as they must be told.

    `withheld`: no fix that one edit could make is right, so none must be proposed. `at`: the line
    that it must be at, where another would run too often; 0 where it may be anywhere.
    """

    def __init__(self, text):
        head, code = text.split("\n---\n", 1)
        self.title, *rest = head.split("\n")
        told = dict(line.split(": ", 1) for line in rest)
        self.code = code.rstrip() + "\n"
        self.names = dict(re.findall(r"(\S.*?)=(cpu|cuda:\d)(?:, |$)", told.get("names", "")))
        self.odd = told.get("odd")
        self.because = told.get("because", "")
        self.withheld = told.get("fix") == "none"
        self.at = int(told.get("at", 0))


def read(name):
    parts = re.split(r"^=== ", (DATA / name).read_text(encoding="utf-8"), flags=re.M)
    return [Snippet(part) for part in parts[1:]]


def run(code, name="snippet.py", namespace=None):
    """The error that running it raises, or None."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    torch.set_default_device(None)
    namespace = {"__name__": "__main__"} | _GIVEN | (namespace or {})
    try:
        with redirect_stdout(io.StringIO()):
            exec(compile(code, name, "exec"), namespace)
    except Exception as error:  # noqa: BLE001  whatever a snippet raises
        return error
    return None


def names_told(explanation):
    """Its operands by each of their names."""
    found = {}
    for operand in explanation.operands:
        for name in (operand.name, operand.also):
            if name is not None:
                found[name.replace("'", '"')] = operand
    return found

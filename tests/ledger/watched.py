"""What the tests of the ledger share."""

import sys
import warnings
from collections import Counter
from contextlib import contextmanager

import torch

from gpumagic.ledger.watch import watch
from gpumagic.virtual import events

WAYS = {"HtoD": "host_to_device", "DtoH": "device_to_host", "PtoP": "device_to_device"}


@contextmanager
def truth():
    """What the virtual devices themselves do, told by their own kernels."""
    told = []

    def listen(kind, operator, source, destination, nbytes):
        # A CPU index that is brought is a copy, whichever operator wants it.
        operator = "index" if kind == "index" else operator
        kind = "wait" if kind == "sync" else "copy"
        if kind == "copy" and not nbytes:
            return  # a real GPU does nothing
        told.append((kind, operator, str(source), str(destination), nbytes))

    events.listeners.append(listen)
    try:
        yield told
    finally:
        events.listeners.remove(listen)


def sums(told):
    """Calls and bytes by kind, operator and devices: what an entry of the ledger holds."""
    calls, nbytes = Counter(), Counter()
    for *key, count in told:
        calls[tuple(key)] += 1
        nbytes[tuple(key)] += count
    return {key: (calls[key], nbytes[key]) for key in calls}


def sums_of(ledger):
    calls, nbytes = Counter(), Counter()
    for e in ledger:
        key = e.kind, e.operator, e.source, e.destination
        calls[key] += e.count
        nbytes[key] += e.nbytes
    return {key: (calls[key], nbytes[key]) for key in calls}


def seen(function, **options):
    """The ledger of one call, which must agree with the devices."""
    if "standin_gpus" in sys.modules:
        return seen_by_runtime(function, **options)
    with warnings.catch_warnings(), truth() as told, watch(**{"warn": False} | options) as w:
        function()
    assert sums_of(w.ledger) == sums(told)
    return w.ledger


def seen_by_runtime(function, **options):
    """The same on the stand-in CUDA runtime, whose log knows bytes and waits, but no operators."""
    import standin_gpus
    from hardware.rows import Traffic, ledger_rows

    def run():
        with warnings.catch_warnings():
            function()

    with watch(**{"warn": False} | options) as w:
        events = standin_gpus.traced(run)
    copied = dict.fromkeys(WAYS.values(), 0)
    for event in events:
        if event["cat"] == "gpu_memcpy":
            copied[WAYS[event["name"]]] += event["args"]["bytes"]
    waits = sum(event["cat"] == "cuda_runtime" for event in events)
    rows = ledger_rows(function.__name__, w.ledger, Traffic(copied, waits), blocking=True)
    assert [row for row in rows if not row.ok] == []
    return w.ledger


def matrix():
    return torch.arange(12.0, device="cuda:1").view(3, 4)

"""What the tests of the ledger share."""

import sys
import warnings
from collections import Counter
from contextlib import contextmanager

import torch

from gpumagic.frameworks.watching import watch
from gpumagic.virtual import checks

WAYS = {"h2d": "host_to_device", "d2h": "device_to_host", "peer": "device_to_device"}


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

    checks.listeners.append(listen)
    try:
        yield told
    finally:
        checks.listeners.remove(listen)


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


def of_ledger(ledger):
    """Bytes to the devices, home, and between them; how often the host waited."""
    nbytes, waits = Counter(), 0
    for e in ledger:
        nbytes[e.direction] += e.nbytes
        waits += e.count if e.kind == "wait" else e.blocking
    return [*(nbytes[way] for way in WAYS.values()), waits]


def of_log(log):
    """The same, as the CUDA runtime was asked for it."""
    return [*map(log.bytes, WAYS), log.count("stream_sync", "device_sync", "event_sync")]


def seen(function, **options):
    """The ledger of one call, which must agree with the devices."""
    runtime = sys.modules.get("standin_cuda")
    on_cuda = runtime is not None and runtime.runtime is not None
    told = runtime.log() if on_cuda else truth()
    with warnings.catch_warnings(), told as told, watch(**{"warn": False} | options) as w:
        function()
    if on_cuda:
        here, true = of_ledger(w.ledger), of_log(told)
        # What a kernel writes to a peer is no copy of the runtime's.
        assert (here[:2], here[3]) == (true[:2], true[3])
        assert here[2] >= true[2]
    else:
        assert sums_of(w.ledger) == sums(told)
    return w.ledger


def matrix():
    return torch.arange(12.0, device="cuda:1").view(3, 4)

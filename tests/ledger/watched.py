"""What the tests of the ledger share."""

import sys
import warnings
from collections import Counter
from contextlib import nullcontext

import torch

from gpumagic.frameworks.watching import watch

WAYS = {"h2d": "host_to_device", "d2h": "device_to_host", "peer": "device_to_device"}


def direction(entry):
    """From where to where the entry's bytes went: a key of `WAYS`' values."""
    if entry.source == "cpu":
        return "host_to_device"
    return "device_to_host" if entry.destination == "cpu" else "device_to_device"


def of_ledger(ledger):
    """Bytes to the devices, home, and between them; how often the host waited."""
    nbytes, waits = Counter(), 0
    for e in ledger:
        nbytes[direction(e)] += e.nbytes
        waits += e.count if e.kind == "wait" else e.blocking
    return [*(nbytes[way] for way in WAYS.values()), waits]


def of_log(log):
    """The same, as the CUDA runtime was asked for it."""
    return [*map(log.bytes, WAYS), log.count("stream_sync", "device_sync", "event_sync")]


def seen(function, **options):
    """The ledger of one call, which must agree with the CUDA runtime's log where there is one."""
    runtime = sys.modules.get("standin_cuda")
    on_cuda = runtime is not None and runtime.runtime is not None
    told = runtime.log() if on_cuda else nullcontext()
    with warnings.catch_warnings(), told as told, watch(**{"warn": False} | options) as w:
        function()
    if on_cuda:
        here, true = of_ledger(w.ledger), of_log(told)
        # What a kernel writes to a peer is no copy of the runtime's.
        assert (here[:2], here[3]) == (true[:2], true[3])
        assert here[2] >= true[2]
    return w.ledger


def matrix():
    return torch.arange(12.0, device="cuda:1").view(3, 4)

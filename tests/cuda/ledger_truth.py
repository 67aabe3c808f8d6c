"""Run the programs, and print as JSON what the ledger and the CUDA runtime's log say of each.

On virtual GPUs, where the runtime has no device, what the ledger says alone.
"""

import json
import sys
from collections import Counter

import standin_cuda
import torch
from ledger_programs import PROGRAMS, SETUP

import gpumagic
from gpumagic import virtual
from gpumagic.ledger import dispatch

WAYS = {"h2d": "host_to_device", "d2h": "device_to_host", "peer": "device_to_device"}


def of_log(log):
    return [*map(log.bytes, WAYS), log.count("stream_sync", "device_sync", "event_sync")]


def direction(entry):
    """From where to where the entry's bytes went: a key of `WAYS`' values."""
    if entry.source == "cpu":
        return "host_to_device"
    return "device_to_host" if entry.destination == "cpu" else "device_to_device"


def of_ledger(ledger):
    """Bytes to the devices, home, and between them; waits."""
    nbytes, waits = Counter(), 0
    for e in ledger:
        nbytes[direction(e)] += e.nbytes
        waits += e.count if e.kind == "wait" else e.blocking
    return [*(nbytes[way] for way in WAYS.values()), waits]


def logged(run):
    with standin_cuda.log() as log:
        run()
    return of_log(log)


def measure(name, code, on_cuda):
    space = {"__name__": "__main__", "d": "cuda:0"}
    exec(SETUP, space)
    compiled = compile(code, f"{name}.py", "exec")

    def run():
        exec(compiled, space)

    run(), run()  # what is made once and kept is there
    found = {}
    if on_cuda:
        dispatch.uninstall()  # what an earlier watch left in front of torch's kernels
        found["torch"] = logged(run)
    with gpumagic.watch(warn=False) as watch:
        if on_cuda:
            found["watched"] = logged(run)
        else:
            run()
    if on_cuda:
        found["after"] = logged(run)
    return found | {"ledger": of_ledger(watch.ledger)}


def main(only):
    on_cuda, found = torch.cuda.is_available(), {}
    if not on_cuda:
        virtual.enable(2, "1GiB")
    for name, code in PROGRAMS.items():
        if not only or name in only:
            try:
                found[name] = measure(name, code, on_cuda)
            except Exception as error:  # noqa: BLE001
                found[name] = {"error": f"{type(error).__name__}: {error}"}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])

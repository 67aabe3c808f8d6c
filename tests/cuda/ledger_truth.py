"""Run the programs, and print as JSON what the ledger and the CUDA runtime's log say of each.

On virtual GPUs, where there is no runtime with a log, what the ledger says alone.
"""

import gc
import json
import sys
from collections import Counter

try:
    import standin_cuda
except ImportError:
    standin_cuda = None
import torch
from ledger_programs import PROGRAMS, SETUP

import gpumagic

WAYS = {"h2d": "host_to_device", "d2h": "device_to_host", "peer": "device_to_device"}


def of_log(log):
    return [*map(log.bytes, WAYS), log.count(*standin_cuda.SYNCS)]


def of_ledger(ledger):
    """Bytes to the devices, home, and between them; waits."""
    nbytes, waits = Counter(), 0
    for e in ledger:
        nbytes[e.direction] += e.nbytes
        waits += e.count if e.kind == "wait" else e.blocking
    return [*(nbytes[way] for way in WAYS.values()), waits]


def logged(run):
    with standin_cuda.log() as log:
        run()
    return of_log(log)


def measure(name, code):
    space = {"__name__": "__main__", "d": "cuda:0"}
    exec(SETUP, space)
    compiled = compile(code, f"{name}.py", "exec")

    def run():
        exec(compiled, space)

    run(), run()  # what is made once and kept is there
    found = {}
    if standin_cuda:
        dispatch.uninstall()  # what an earlier watch left in front of torch's kernels
        found["torch"] = logged(run)
    watch = gpumagic.watch(warn=False)
    with watch:
        if standin_cuda:
            found["watched"] = logged(run)
        else:
            run()
    if standin_cuda:
        found["after"] = logged(run)
    return found | {"ledger": of_ledger(watch.ledger)}


def main(only):
    found = {}
    for name, code in PROGRAMS.items():
        if not only or name in only:
            try:
                found[name] = measure(name, code)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            gc.collect()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    if not standin_cuda:
        gpumagic.virtual.enable(2, "1GiB")
    from gpumagic.ledger import dispatch

    main(sys.argv[1:])

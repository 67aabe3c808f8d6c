"""What the tests of dry runs share: a cell's, and the same code really run on a virtual GPU."""

import ast
import gc
from types import SimpleNamespace

import pytest

import gpumagic
from gpumagic.cell.run import Run
from gpumagic.device import Device
from gpumagic.dryrun.follow_code import dry_run_cell


def measured(function, *args):
    """The peak on cuda:1 while `function` runs there, as `%%ongpu` reports it, and its value."""
    gc.collect()
    space = {"args": args, "function": function}
    run = Run(Device("cuda", ordinal=1, virtual=True), space, ["args"])
    run.start()
    value = function(*args)
    report = run.finish()
    return {memory.device: memory.peak for memory in report.memory}["cuda:1"], value


def check(function, *args, rel=0.01):
    """The dry run goes to the end, and its peak is the real one."""
    gc.collect()
    result = gpumagic.dry_run(function, *args, on=1)
    assert result.complete, result
    real, value = measured(function, *args)
    assert result.peak["cuda:1"].peak == pytest.approx(real, rel=rel)
    return result, value


def dry(ip, cell, options="1"):
    done = ip.run(f"%%ongpu {options} --dry-run\n{cell}")
    assert done.success, done.text
    assert isinstance(done.result, gpumagic.DryRun)
    assert str(done.result) in done.text
    return done.result


def of_cell(code, space, on=None):
    """The dry run of a cell whose variables are `space`."""
    shell = SimpleNamespace(user_ns=space, transform_cell=str, compile=SimpleNamespace(flags=0))
    return dry_run_cell(shell, ast.parse(code), "<cell>", on)


def assigned(result):
    return {a.name: (a.kind, a.device) for a in result.assigned}


def ended(result):
    """The line at which it ended, and why."""
    (end,) = (unknown for unknown in result.unknown if unknown.ended)
    return end.where.line, end.reason

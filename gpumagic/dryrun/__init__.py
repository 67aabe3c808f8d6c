"""Predict what a cell or a function would do, without computing or changing anything.

The code is followed in a forked copy of the process, where every tensor is one without data
(torch's fake tensors): shapes, dtypes, devices, copies, waits and memory are what they would be.
What depends on data ends the dry run, with the result up to there.
"""

from gpumagic.display import table
from gpumagic.dryrun.dry_function import dry_run
from gpumagic.dryrun.result import Assigned, DryRun, Mismatch, Peak, Unknown

__all__ = ["Assigned", "DryRun", "Mismatch", "Peak", "Unknown", "dry_run"]

table.register("gpumagic.dryrun.result.DryRun", "gpumagic.dryrun.result")

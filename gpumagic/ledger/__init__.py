"""Count every copy between devices and every wait of the host, by the user's line.

There is no mode over the operators: only the few that can copy or wait have a kernel of ours in
front of theirs, at the device's own dispatch key, so operators of the CPU and all others of the GPU
cost what they cost without it. Guarantees: results, gradients and exceptions are those without it;
a failure of ours never reaches the user's code; our kernels pass calls on while nothing watches,
and `%unload_ext gpumagic` puts torch's registry and attributes back as they were.
"""

from gpumagic.display import table

table.register("gpumagic.ledger.entry.Ledger", "gpumagic.ledger.ledger_view")

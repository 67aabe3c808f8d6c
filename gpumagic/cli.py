"""Define the command `gpumagic`: show the GPUs, diagnose problems, run notebooks."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata

from gpumagic.errors import GpuError, as_in_a_shell, meant

_EXAMPLES = """\
examples:
  gpumagic top                           a live table of the GPUs and their notebooks
  gpumagic snapshot --processes          the table once, with a line for each process
  gpumagic snapshot --watch 2 --json     a line of JSON every two seconds
  gpumagic doctor                        why a GPU is not found
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return the exit status."""
    parser = _parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown or "run" not in args:
        known = {"help", "version", *vars(args)} - {"run", "enable"}
        what = f"unexpected {unknown[0]}" if unknown else "a command is needed"
        cure = meant(what, map("--{}".format, known)) or "type gpumagic --help"
        parser.error(f"{what}; {cure}".rstrip())
    try:
        return int(args.run(args))
    except GpuError as error:
        print(f"gpumagic: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the pipe's reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "gpumagic", description="GPUs for notebooks.", epilog=_EXAMPLES, formatter_class=raw
    )
    version = f"gpumagic {metadata.version('gpumagic')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers()
    keys = "q quits, the arrows scroll, s sorts by the next column, p lists each process."
    live = commands.add_parser("top", help="the table of %%gpus, live in a terminal", epilog=keys)
    live.add_argument("--period", type=float, default=1.0, metavar="SECONDS", help="default: 1")
    live.set_defaults(run=_top)
    snapshot = commands.add_parser("snapshot", help="the table of %%gpus")
    snapshot.add_argument("--json", action="store_true", help="as JSON")
    snapshot.add_argument("--processes", action="store_true", help="a line for each process")
    snapshot.add_argument("--watch", type=seconds, metavar="SECONDS", help="repeat every SECONDS")
    snapshot.set_defaults(run=_snapshot)
    doctor = commands.add_parser("doctor", help="say why a GPU is not found, and how to fix it")
    doctor.set_defaults(run=_doctor)
    about = "load gpumagic in new notebooks when one of its magics is first used"
    commands.add_parser("enable", help=about).set_defaults(run=_loading, enable=True)
    commands.add_parser("disable", help="undo enable").set_defaults(run=_loading, enable=False)
    return parser


def _loading(args: argparse.Namespace) -> int:
    from gpumagic.magics import loading

    print(loading.enable() if args.enable else loading.disable())
    return 0


def seconds(text: str) -> float:
    """Parse seconds. argparse's errors name this function, as in ``invalid seconds value: 'x'``."""
    found = float(text)
    if not 0 < found <= 86400:
        raise argparse.ArgumentTypeError(f"{text} s must be above 0, at most 86400; type --watch 2")
    return found


def _top(args: argparse.Namespace) -> int:
    try:
        from gpumagic.gputable.top import top
    except ImportError:  # Windows has no curses
        raise GpuError("this Python has no curses; type gpumagic snapshot --watch 2") from None
    return top(args.period)


def _snapshot(args: argparse.Namespace) -> int:
    from gpumagic.gputable.gpu_table import GpuTable
    from gpumagic.telemetry.collect import snapshot

    with suppress(KeyboardInterrupt):
        while True:
            found = snapshot()
            shown = found.to_json() if args.json else GpuTable(found, processes=args.processes)
            print(as_in_a_shell(shown), flush=True)
            if args.watch is None:
                break
            time.sleep(args.watch)
            print(end="" if args.json else "\n")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from gpumagic.gputable.gpu_table import DoctorTable
    from gpumagic.telemetry.doctor import Doctor

    checks = Doctor().checks()
    print(DoctorTable(checks))
    return int(any(check.ok is False for check in checks))

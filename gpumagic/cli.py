"""Run ``gpumagic demo`` and its like: the same without a notebook."""

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from gpumagic.errors import GpuError, meant

_COMMANDS = ("demo", "snapshot", "doctor", "enable", "disable")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the command line; the value is the exit status."""
    args = _parser().parse_args(arguments)
    try:
        status: int = args.run(args)
    except GpuError as error:
        print(f"gpumagic: {error}", file=sys.stderr)
        return 2
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        given = re.search(r"invalid choice: '(.*?)'", message)
        question = meant(given[1], _COMMANDS) if given else ""
        super().error(f"{message}; {question}" if question else message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("gpumagic", description="GPUs in notebooks, and without one.")
    parser.add_argument(
        "--version", action="version", version=f"gpumagic {metadata.version('gpumagic')}"
    )
    commands = parser.add_subparsers(required=True, metavar="|".join(_COMMANDS))
    demo = commands.add_parser("demo", help="run a notebook headless and show its reports")
    demo.add_argument("notebook", nargs="?", type=Path, help="default: the quickstart")
    demo.add_argument("--output", type=Path, default=Path("demo"), help="folder for the HTML")
    demo.set_defaults(run=_demo)
    snapshot = commands.add_parser("snapshot", help="what %%gpus shows")
    snapshot.add_argument("--json", action="store_true", help="as JSON")
    snapshot.set_defaults(run=_snapshot)
    doctor = commands.add_parser("doctor", help="what cannot be seen, why, and how to fix it")
    doctor.set_defaults(run=_doctor)
    about = "let the first magic of a notebook load the extension"
    commands.add_parser("enable", help=about).set_defaults(run=_enable)
    about = "take back what enable wrote"
    commands.add_parser("disable", help=about).set_defaults(run=_disable)
    return parser


def _enable(args: argparse.Namespace) -> int:
    from gpumagic.magics.loading import enable

    print(enable())
    return 0


def _disable(args: argparse.Namespace) -> int:
    from gpumagic.magics.loading import disable

    print(disable())
    return 0


def _demo(args: argparse.Namespace) -> int:
    from gpumagic.demo import run

    return run(args.notebook, args.output)


def _snapshot(args: argparse.Namespace) -> int:
    from gpumagic.gputable.gpu_table import GpuTable
    from gpumagic.telemetry.collect import snapshot

    found = snapshot()
    print(found.to_json() if args.json else GpuTable(found))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from gpumagic.gputable.gpu_table import DoctorTable
    from gpumagic.telemetry.doctor import Doctor

    checks = Doctor().checks()
    print(DoctorTable(checks))
    return int(any(check.ok is False for check in checks))

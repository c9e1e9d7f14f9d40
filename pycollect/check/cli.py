"""The command line of `python -m pycollect check`. Help imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

_EXAMPLES = """examples:
  python -m pycollect check CartPole-v1
  python -m pycollect check MyEnv-v0 --module my_package.envs   # which registers MyEnv-v0
  python -m pycollect check CartPole-v1 --vector 4              # gymnasium.make_vec, too

exit code: 0 without errors (warnings do not count), 1 with errors, 2 for a wrong argument
"""
_HANG_SECONDS = 600.0
"""Time without an end of a check after which C code that cannot be interrupted is reported."""


def add_command(commands: Any) -> None:
    """Add `check` to the subparsers of `python -m pycollect`."""
    parser = commands.add_parser(
        "check",
        help="step an environment and name its faults",
        description="Step a Gymnasium environment in the ways in which it can be collected, and\n"
        "report its faults and how to correct them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("env", metavar="ENV_ID", help="Gymnasium id, or module:id")
    add("--module", metavar="M", help="import this module first; it registers the id")
    add("--vector", type=_count, metavar="N", help="also check gymnasium.make_vec(ENV_ID, N)")
    add(
        "--seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="about how long to step each environment (default: %(default)s)",
    )
    add(
        "--ignore",
        action="append",
        default=[],
        metavar="CODE",
        help="leave out findings with this code; may be repeated",
    )
    add("--json", action="store_true", help="print one JSON object per environment, on one line")
    parser.set_defaults(run=partial(_run, parser), parser=parser)


def _count(text: str) -> int:
    """Return an int of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {value}")
    return value


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send output of this process, its C code and its worker processes to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _as_json(report: Any) -> str:
    findings = [dataclasses.asdict(own) for own in report.findings]
    return json.dumps(
        {"environment": report.env, "findings": findings, "not_checked": report.skipped}
    )


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Check the environment and print the report; return the exit code."""
    sys.path.insert(0, os.getcwd())
    if args.module is not None:
        try:
            importlib.import_module(args.module)
        except Exception as error:
            parser.error(f"--module: {type(error).__name__}: {error}")
    try:
        import gymnasium
    except ModuleNotFoundError:
        parser.error("gymnasium is not installed: pip install gymnasium")

    from pycollect.check.api import check_env

    entries = [(args.env, args.env)]
    if args.vector is not None:
        make = partial(gymnasium.make_vec, args.env, num_envs=args.vector)
        entries.append((f"{args.env}, {args.vector} environments", make))
    wrong = False
    for name, entry in entries:
        seconds = _HANG_SECONDS + 10 * min(max(0.0, args.seconds), _HANG_SECONDS)
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
        try:
            with _output_to_stderr() if args.json else contextlib.nullcontext():
                report = check_env(entry, seconds=args.seconds, worker=True, ignore=args.ignore)
        except (TypeError, ValueError) as error:
            parser.error(str(error))
        finally:
            faulthandler.cancel_dump_traceback_later()
        report.env = name
        print(_as_json(report) if args.json else report, flush=True)
        wrong = wrong or not report.ok
    return int(wrong)

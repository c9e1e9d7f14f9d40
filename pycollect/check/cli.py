"""The command line of `python -m pycollect check`. Help imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import importlib
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from pycollect.arguments import positive
from pycollect.check.report import Draft

_EXAMPLES = """examples:
  python -m pycollect check CartPole-v1
  python -m pycollect check MyEnv-v0 --module my_package.envs   # which registers MyEnv-v0
  python -m pycollect check CartPole-v1 --vector 4              # gymnasium.make_vec, too

exit code: 0 without errors (warnings do not count), 1 with errors, 2 for a wrong argument
"""
_HANG_SECONDS = 600.0
"""Time without an end of a check after which C code that cannot be interrupted is reported."""

_INTERRUPT_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1
_FIX_OF_EXIT = (
    "Do not end the process in the environment. After a fatal signal or a timeout, the traceback "
    "on stderr names the line."
)


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
    add("--vector", type=positive, metavar="N", help="also check gymnasium.make_vec(ENV_ID, N)")
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
    findings = [dataclasses.asdict(finding) for finding in report.findings]
    parts = {"environment": report.env, "findings": findings, "not_checked": report.skipped}
    return json.dumps(parts)


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Check the environment in a child process and print the report; return the exit code.

    An environment may end its process, perhaps with exit code 0. The child therefore also writes
    its exit code to shared memory. If torch is imported, a fork is not safe, and this process
    checks.
    """
    if "torch" in sys.modules:
        return _check(parser, args)
    result = mmap.mmap(-1, 1)  # the exit code plus 1, or 0 if the environment ended the child
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        code = 1
        try:
            code = _check(parser, args)
        except KeyboardInterrupt:
            code = 130
        except SystemExit:  # of the parser
            code = 2
        except BrokenPipeError:
            code = 141
            raise  # handled by the command line
        finally:
            result[0] = code + 1
        return code
    try:
        _, status = os.waitpid(child, 0)
    except KeyboardInterrupt:  # Ctrl-C has reached the child, too; else it dies with this process
        deadline = time.monotonic() + _INTERRUPT_SECONDS
        while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        raise
    if result[0]:
        return result[0] - 1
    report = Draft(args.env)
    ended = os.waitstatus_to_exitcode(status)
    how = f"exit code {ended}" if ended >= 0 else f"signal {-ended} ({signal.strsignal(-ended)})"
    report.add("crashes", f"the process ended with {how} during the check", fix=_FIX_OF_EXIT)
    print(_as_json(report) if args.json else report, flush=True)
    return 1


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Check the environment in this process and print the report; return the exit code."""
    faulthandler.enable(file=sys.__stderr__ or 2)
    sys.path.insert(0, os.getcwd())
    target = args.env
    if args.module is not None:
        try:
            importlib.import_module(args.module)
        except (Exception, SystemExit) as error:
            parser.error(f"--module: {type(error).__name__}: {error}")
        if ":" not in args.env:
            target = f"{args.module}:{args.env}"  # workers import it, too
    try:
        import gymnasium
    except ModuleNotFoundError:
        parser.error("gymnasium is not installed: pip install gymnasium")

    from pycollect.check.api import check_env

    entries = [(args.env, target)]
    if args.vector is not None:
        make = partial(gymnasium.make_vec, target, num_envs=args.vector)
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

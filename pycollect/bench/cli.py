"""The command line of `python -m pycollect bench`. Help imports no torch."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pycollect.bench.rows import Row, table, with_ratios, write_json

_PARTS = ("host", "steps", "splits", "gathers", "collectors")
"""Costs of the host, steps of a batch's way, trajectories, the kernel, and whole collectors."""

_CPU_EXAMPLES = """\
  python -m pycollect bench cpu --quick
  python -m pycollect bench cpu --env Pendulum-v1 --workers 4 --json pendulum.json
"""
_GPU_EXAMPLES = """\
  python -m pycollect bench gpu --quick
  python -m pycollect bench gpu --parts steps splits --plot rates.png
  python -m pycollect bench gpu --parts collectors --workers 14 --sides central TorchRL
"""

_Measure = Callable[[argparse.Namespace], Iterable[list[Row]]]


def add_command(commands: Any) -> None:
    """Add `bench` to the subparsers of `python -m pycollect`."""
    text = "measure what this machine reaches"
    examples = _CPU_EXAMPLES + _GPU_EXAMPLES
    parser = _with_examples(commands, "bench", text, text.capitalize() + ".", examples)
    parser.set_defaults(run=lambda _: parser.print_help())
    benches = parser.add_subparsers(metavar="what")
    _add_cpu(benches)
    _add_gpu(benches)


def _add_cpu(benches: Any) -> None:
    cpu = _with_examples(
        benches,
        "cpu",
        "collectors of one environment, beside a plain loop",
        "Measures collectors of one environment with random actions, in this process and in "
        "processes beside it, and how long workers take to start; a plain loop over the "
        "environment, and TorchRL's collectors where it is installed, beside them.",
        _CPU_EXAMPLES,
    )
    cpu.add_argument("--env", default="CartPole-v1", help="a Gymnasium id [%(default)s]")
    _add_workers(cpu, [2])
    _add_common(cpu, _cpu)


def _add_gpu(benches: Any) -> None:
    gpu = _with_examples(
        benches,
        "gpu",
        "batches on their way to a GPU, beside plain copies",
        "Measures copies, assembly, upload, casts, splitting, and whole collectors with a Nature "
        "CNN on the GPU, beside TorchRL's where it is installed, a loop written by hand and the "
        "policy alone. Without a GPU its rows are marked as not available.",
        _GPU_EXAMPLES,
    )
    gpu.add_argument(
        "--parts",
        nargs="+",
        choices=_PARTS,
        default=_PARTS,
        metavar="PART",
        help=f"measure only these of {', '.join(_PARTS)}; limits and peers are within a part, but "
        "for those of 'steps'",
    )
    _add_workers(gpu, [1, 8, 14])
    gpu.add_argument(
        "--sides",
        nargs="+",
        default=(),
        metavar="NAME",
        help="of the collectors only these, as they are called in the table",
    )
    gpu.add_argument("--device", default="cuda:0", help="[%(default)s]")
    gpu.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates (matplotlib)")
    _add_common(gpu, _gpu)


def _add_workers(parser: argparse.ArgumentParser, default: list[int]) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=default,
        metavar="N",
        help=f"processes of a collector [{' '.join(map(str, default))}]",
    )


def _with_examples(commands: Any, name: str, text: str, description: str, examples: str) -> Any:
    return commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_common(parser: argparse.ArgumentParser, measure: _Measure) -> None:
    parser.add_argument("--quick", action="store_true", help="small sizes: less than a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.set_defaults(run=partial(run, parser, measure), plot=None)


def _cpu(args: argparse.Namespace) -> Iterable[list[Row]]:
    from pycollect.bench.cpu import measure

    return measure(args.env, args.workers, quick=args.quick)


def _gpu(args: argparse.Namespace) -> Iterable[list[Row]]:
    from pycollect.bench.gpu import measure

    return measure(args.parts, args.device, args.workers, args.sides, quick=args.quick)


def run(parser: argparse.ArgumentParser, measure: _Measure, args: argparse.Namespace) -> int:
    """A benchmark; returns the exit code.

    Args:
        measure: gives the rows of each part.
    """
    if find_spec("gymnasium") is None:
        parser.error("gymnasium is not installed: pip install gymnasium")
    if args.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed: pip install matplotlib")
    from pycollect.bench.machine import headline, machine

    os.environ.setdefault("RL_WARNINGS", "0")  # TorchRL's, of its own tables
    command = shlex.join(["python", "-m", "pycollect", *sys.argv[1:]])
    rows: list[Row] = []
    try:
        for part in measure(args):
            known = len(rows)
            rows = with_ratios([*rows, *part])
            # After each part, so that who is stopped keeps those before.
            print(f"{table(rows[known:])}\n", flush=True)
            if args.json is not None:
                write_json(args.json, rows, machine(), command)
    except ValueError as error:
        parser.error(str(error))
    facts = machine()
    print(headline(facts), flush=True)
    if args.plot is not None:
        from pycollect.bench.plot import save_plot

        save_plot(rows, facts["gpu"] or "no GPU", args.plot)
    return 0

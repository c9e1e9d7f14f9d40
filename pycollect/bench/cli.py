"""The command line of `python -m pycollect bench`. Help imports no torch."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pycollect.bench.report import (
    Row,
    headline,
    machine,
    missing,
    save_plot,
    table,
    with_ratios,
    write_json,
)

_PARTS = ("host", "steps", "splits", "gathers", "simulator", "collectors")
"""Host costs, steps of a batch's transfer, splitting, gather kernel, environments on the GPU, and
collectors of processes."""
_QUICK_SECONDS, _SECONDS = 0.1, 1.0  # of each case

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
    text = "measure the speed of collectors on this machine"
    examples = _CPU_EXAMPLES + _GPU_EXAMPLES
    parser = _with_examples(commands, "bench", text, text.capitalize() + ".", examples)
    parser.set_defaults(run=lambda _: parser.print_help(), parser=parser)
    benches = parser.add_subparsers(metavar="benchmark")
    _add_cpu(benches)
    _add_gpu(benches)


def _add_cpu(benches: Any) -> None:
    cpu = _with_examples(
        benches,
        "cpu",
        "compare collectors of one environment with a plain loop",
        "Measure collectors of one environment with random actions, in this process and in\n"
        "worker processes, and the start-up time of workers. Compare them with a plain loop\n"
        "over the environment and, if TorchRL is installed, with its collectors.",
        _CPU_EXAMPLES,
    )
    cpu.add_argument("--env", default="CartPole-v1", help="Gymnasium id (default: %(default)s)")
    _add_workers(cpu, [2])
    _add_common(cpu, _cpu)


def _add_gpu(benches: Any) -> None:
    gpu = _with_examples(
        benches,
        "gpu",
        "measure the transfer of batches to a GPU, and collectors with a GPU policy",
        "Measure copies, assembly, upload, casts, splitting, a simulator on the GPU, and\n"
        "collectors with a Nature CNN on the GPU. Compare the collectors with a hand-written\n"
        "loop, the policy alone and, if TorchRL is installed, its collectors. Without a GPU,\n"
        "rows that need one are marked as not available.",
        _GPU_EXAMPLES,
    )
    gpu.add_argument(
        "--parts",
        nargs="+",
        choices=_PARTS,
        default=_PARTS,
        metavar="PART",
        help=f"measure only these parts: {', '.join(_PARTS)} (default: all). A row is compared "
        "with rows of the same part, and some are compared with copies measured by 'steps'",
    )
    _add_workers(gpu, [1, 8, 14])
    gpu.add_argument(
        "--sides",
        nargs="+",
        default=(),
        metavar="NAME",
        help="measure only collectors with these names in the table (default: all, or some with "
        "--quick)",
    )
    gpu.add_argument("--device", default="cuda:0", help="GPU (default: %(default)s)")
    gpu.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the rates; requires matplotlib"
    )
    _add_common(gpu, _gpu)


def _add_workers(parser: argparse.ArgumentParser, default: list[int]) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=default,
        metavar="N",
        help=f"numbers of worker processes (default: {' '.join(map(str, default))})",
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
    parser.add_argument(
        "--quick", action="store_true", help="measure each case only briefly, in about a minute"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.set_defaults(run=partial(run, parser, measure), parser=parser, plot=None)


def _cpu(args: argparse.Namespace) -> Iterable[list[Row]]:
    from pycollect.bench.cpu import measure

    return measure(args.env, args.workers, quick=args.quick)


def _gpu(args: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield rows as soon as they are measured; raise ValueError for an unknown device or side.

    Rows that need a missing device are marked as not available. A case that fails is reported as a
    row, and the next ones are still measured. On "cpu", only collectors and the host's own rows are
    measured.
    """
    from pycollect.bench import copies, gpu_trajectories, pixels, simulator
    from pycollect.data.devices import named_device, why_not

    device = named_device("--device", args.device)
    for side in args.sides:
        if side not in pixels.SIDES:
            known = ", ".join(pixels.SIDES)
            raise ValueError(f"--sides: expected names from {known}; got {side!r}")
    sides = args.sides or (pixels.QUICK_SIDES if args.quick else tuple(pixels.SIDES))
    is_cpu, seconds = device.type == "cpu", _QUICK_SECONDS if args.quick else _SECONDS
    why = "the device is the CPU" if is_cpu else why_not(device)
    # More than caches hold: a batch of 260 MB; 128 MB that are split, 256 MB that are gathered.
    sizes = copies.Sizes(4608, 1_000_000, 256e6, seconds)
    material = cache(lambda: copies.Material(sizes.frames))
    cases: dict[str, list[Callable[[], list[Row]]]] = {
        "host": [lambda: copies.host_cost_rows(sizes, device, why)],
        "steps": [
            lambda: copies.host_rows(sizes, material()),
            lambda: copies.device_rows(sizes, material(), device, why),
        ],
        "splits": [lambda: gpu_trajectories.split_rows(sizes, device, why)],
        "gathers": [lambda: gpu_trajectories.gather_rows(sizes, device, why)],
        "simulator": [
            partial(simulator.simulator_rows, envs, seconds, device, "" if is_cpu else why)
            for envs in simulator.SIZES
        ],
        "collectors": [lambda: [missing("collectors", why)]]
        if why and not is_cpu
        else [
            partial(pixels.side_rows, side, count, 2.5 * seconds, device)
            for count in args.workers
            for side in sides
        ],
    }
    for part in args.parts:
        for measured in cases[part]:
            try:
                yield measured()
            except Exception as error:  # the time on such a machine is short
                yield [missing(f"{part}, which failed", f"{type(error).__name__}: {error}")]


def run(parser: argparse.ArgumentParser, measure: _Measure, args: argparse.Namespace) -> int:
    """Run a benchmark; return the exit code."""
    if find_spec("gymnasium") is None:
        parser.error("gymnasium is not installed: pip install gymnasium")
    if args.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed: pip install matplotlib")
    for name, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("a").close()
            except OSError as error:
                parser.error(f"{name}: {error}")
    os.environ.setdefault("RL_WARNINGS", "0")  # hides TorchRL's warnings in the table
    command = shlex.join(["python", "-m", "pycollect", *sys.argv[1:]])
    rows: list[Row] = []
    try:
        if min(args.workers) < 1:
            raise ValueError(f"--workers: expected numbers of at least 1, got {min(args.workers)}")
        for part in measure(args):
            known = len(rows)
            rows = with_ratios([*rows, *part])
            # After each part, so that an interrupted run keeps its results.
            print(f"{table(rows[known:])}\n", flush=True)
            if args.json is not None:
                write_json(args.json, rows, machine(), command)
    except ValueError as error:
        parser.error(str(error))
    facts = machine()
    print(headline(facts), flush=True)
    if args.plot is not None:
        try:
            save_plot(rows, facts["gpu"] or "no GPU", args.plot)
        except ValueError as error:  # the format
            parser.error(f"--plot: {error}")
    return 0

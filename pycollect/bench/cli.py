"""The command line of `python -m pycollect bench`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pycollect.bench.machine import headline, machine
from pycollect.bench.rows import Row, table, with_ratios, write_json

QUICK = (128, 20_000, 4e6, 0.1)
"""Frames of a batch, frames that are split, bytes that are gathered, seconds of each case."""
WHOLE = (1280, 1_000_000, 256e6, 1.0)
PARTS = ("host", "steps", "splits", "gathers", "collectors", "nature")
"""Costs of the host, steps of a batch's way, trajectories, the kernel, and two kinds of wholes."""


def add_command(commands: Any) -> None:
    """Add `bench` to the subparsers of `python -m pycollect`."""
    parser = commands.add_parser("bench", help="measure what this machine reaches")
    benches = parser.add_subparsers(metavar="what", required=True)
    gpu = benches.add_parser(
        "gpu",
        help="batches on their way to a GPU, beside plain copies",
        description="Measures copies, assembly, upload, casts, splitting, whole collectors, and "
        "TorchRL's where it is installed. Without a GPU its rows are marked as not available.",
    )
    gpu.add_argument("--quick", action="store_true", help="small sizes: less than a minute")
    gpu.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        metavar="PART",
        help=f"measure only these of {', '.join(PARTS)}; limits and peers are within a part, but "
        "for those of 'steps'",
    )
    gpu.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    gpu.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates (matplotlib)")
    gpu.set_defaults(run=partial(run, gpu))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """The benchmark; returns the exit code."""
    if find_spec("gymnasium") is None:
        parser.error("gymnasium is not installed: pip install gymnasium")
    if args.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed: pip install matplotlib")
    os.environ.setdefault("RL_WARNINGS", "0")  # TorchRL's, of its own tables
    command = shlex.join(["python", "-m", "pycollect", *sys.argv[1:]])
    rows: list[Row] = []
    for part in measure(args.parts, quick=args.quick):
        known = len(rows)
        rows = with_ratios([*rows, *part])
        # After each part, so that who is stopped keeps those before.
        print(f"{table(rows[known:])}\n", flush=True)
        if args.json is not None:
            write_json(args.json, rows, machine(), command)
    facts = machine()
    print(headline(facts), flush=True)
    if args.plot is not None:
        from pycollect.bench.plot import save_plot

        save_plot(rows, facts["gpu"] or "no GPU", args.plot)
    return 0


def measure(parts: Sequence[str] = PARTS, *, quick: bool) -> Iterator[list[Row]]:
    """The rows of those parts, one after the other; where there is no GPU, those that need one are
    marked.
    """
    from pycollect.bench.copies import Material, Sizes, device_rows, host_rows
    from pycollect.bench.gathers import gather_rows
    from pycollect.bench.host_costs import host_cost_rows
    from pycollect.bench.nature import nature_rows
    from pycollect.bench.splits import split_rows
    from pycollect.bench.wholes import collector_rows
    from pycollect.devices import why_not

    sizes = Sizes(*(QUICK if quick else WHOLE))
    device = torch.device("cuda", 0)
    reason = why_not(device)
    material = Material(sizes.frames)
    measured: dict[str, Callable[[], list[Row]]] = {
        "host": lambda: host_cost_rows(sizes, device, reason),
        "steps": lambda: [
            *host_rows(sizes, material),
            *device_rows(sizes, material, device, reason),
        ],
        "splits": lambda: split_rows(sizes, device, reason),
        "gathers": lambda: gather_rows(sizes, device, reason),
        "collectors": lambda: collector_rows(
            sizes, material.megabytes, device, reason, quick=quick
        ),
        "nature": lambda: nature_rows(device, reason, quick=quick),
    }
    for part in PARTS:
        if part in parts:
            yield measured[part]()

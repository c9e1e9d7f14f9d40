"""The command line of `python -m pycollect bench`."""

from __future__ import annotations

import argparse
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pycollect.bench.rows import Row, machine, table, with_ratios, write_json

QUICK = (128, 20_000, 0.1)
"""Frames of a batch, frames that are split, seconds of each case."""
WHOLE = (1280, 1_000_000, 2.0)


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
    rows = measure(quick=args.quick)
    facts = machine()
    print(f"{facts['gpu'] or 'no GPU'}, {facts['cores']} cores\n\n{table(rows)}", flush=True)
    if args.json is not None:
        write_json(args.json, rows, args.quick)
    if args.plot is not None:
        from pycollect.bench.plot import save_plot

        save_plot(rows, facts["gpu"] or "no GPU", args.plot)
    return 0


def measure(*, quick: bool) -> list[Row]:
    """All rows; those that need a GPU are marked where there is none."""
    from pycollect.bench.copies import Material, Sizes, device_rows, host_rows
    from pycollect.bench.splits import split_rows
    from pycollect.bench.wholes import collector_rows
    from pycollect.devices import why_not

    sizes = Sizes(*(QUICK if quick else WHOLE))
    device = torch.device("cuda", 0)
    reason = why_not(device)
    material = Material(sizes.frames)
    return with_ratios(
        [
            *host_rows(sizes, material),
            *device_rows(sizes, material, device, reason),
            *split_rows(sizes, device, reason),
            *collector_rows(sizes, material.megabytes, device, reason, quick=quick),
        ]
    )

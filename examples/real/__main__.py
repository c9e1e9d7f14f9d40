"""Run the real programs: check their episodes, measure their sides, print and store the table.

pip install -r examples/real/requirements.txt
python -m examples.real
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from examples.real.programs import PROGRAMS

RESULTS = Path("benchmarks/results")
SMOKE = ("cartpole", "pong")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if an episode was collected wrong."""
    parser = argparse.ArgumentParser(prog="python -m examples.real", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, help="run only these programs")
    parser.add_argument("--rounds", type=int, default=5, help="turns per side (default: 5)")
    parser.add_argument("--turn", type=float, default=1.0, help="seconds per turn (default: 1)")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=f"run {' and '.join(SMOKE)} once and briefly; no figures",
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write the results to {RESULTS}/real.json and real.md"
    )
    asked = parser.parse_args(arguments)
    os.environ["RL_LOGGING_LEVEL"] = "WARNING"  # TorchRL's variable, inherited by all processes

    import torch

    from examples.real import report
    from examples.real.run import run

    torch.set_num_threads(1)  # like the sides
    names = asked.only or (SMOKE if asked.smoke else tuple(PROGRAMS))
    command = shlex.join(["python", "-m", "examples.real", *(arguments or sys.argv[1:])])
    wrong = 0
    for name in names:
        program = PROGRAMS[name]
        lacking = [
            package for module, package in program.needs.items() if find_spec(module) is None
        ]
        if lacking:
            print(f"{program.title}: skipped, not installed: {', '.join(lacking)}", flush=True)
            continue
        result = run(name, rounds=asked.rounds, seconds=asked.turn, smoke=asked.smoke)
        wrong += len(result.wrong)
        print(report.section(result, figures=not asked.smoke), flush=True)
        if asked.write and not asked.smoke:
            report.keep(RESULTS, result, command)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

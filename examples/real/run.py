"""Run one program: compare its episodes, measure its sides in turns."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from benchmarks.race import Race, Row
from examples.real.episodes import compared
from examples.real.programs import PROGRAMS
from examples.real.sides import LOOP, WANTED, sides_of


@dataclass(frozen=True)
class Result:
    """Results of one program.

    Attributes:
        name: Name of the program.
        episodes: Number of compared episodes.
        wrong: One line per episode that differs from the environment's statistics.
        rows: One row per side.
        left_out: Sides that were not measured, with the reason.
        load: Load average of the machine before and after.
    """

    name: str
    episodes: int
    wrong: tuple[str, ...]
    rows: tuple[Row, ...]
    left_out: dict[str, str]
    load: tuple[float, float]


def run(name: str, *, rounds: int, seconds: float, smoke: bool) -> Result:
    """Compare and measure one program.

    Args:
        rounds: Number of turns per side.
        seconds: Duration of a turn.
        smoke: Run one batch per side and one episode; the figures are meaningless.
    """
    program = PROGRAMS[name]
    before = os.getloadavg()[0]
    found = compared(replace(program, episodes=1) if smoke else program)
    sides, left_out = sides_of(name)
    race = Race(
        program.title,
        sides,
        frame_bytes=0,
        wanted={**WANTED, LOOP: program.of_loop},
        seconds=0.0 if smoke else seconds,
        prepared=not smoke,
    )
    with race:
        for _ in range(1 if smoke else rounds):
            race.round()
    load = (before, os.getloadavg()[0])
    return Result(name, found.episodes, tuple(found.wrong), tuple(race.rows()), left_out, load)

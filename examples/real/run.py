"""One program: its episodes compared, its sides measured in turns."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from benchmarks.race import Race, Row
from examples.real.episodes import compared
from examples.real.programs import PROGRAMS
from examples.real.sides import LOOP, WANTED, sides_of


@dataclass(frozen=True)
class Result:
    """What came out of one program.

    Attributes:
        name: the program's.
        episodes: how many were compared.
        wrong: a line for each that was collected otherwise than its environment tells.
        rows: a line for each side.
        left_out: sides that were not measured, and why.
        load: the machine's load average before and after.
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
        rounds: turns of each side.
        seconds: of a turn.
        smoke: each side one batch, and one episode; the figures mean nothing.
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

"""Measure several ways of doing the same work against each other.

Every *side* runs in a process of its own (so that its memory is its own, and no side pays for
what another has imported or left to the garbage collector), and only one side runs at a time. A
*turn* is a stretch of about the same wall time for each side; a *round* is one turn of every
side, in an order that shifts from round to round. What is compared are the rates of the same
round, so that a machine which gets slower or faster in between changes both; what is reported is
the median over the rounds.
"""

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psutil

START_TIMEOUT = 180.0
"""Seconds that a side may take to be built and to deliver its first batch."""

TURN_TIMEOUT = 120.0
"""Seconds that a turn may take."""

LEAD = 0.2
"""Seconds that a side runs untimed first: its caches and queues are then as in a long run."""


WARM_UP = 3.0
"""Length of the turn before the first round, in turns: Ray's object store, for one, needs about a
hundred batches of pixels until it lies on memory that every process has touched."""


PRELOADED = ["torch", "tensordict.nn", "gymnasium"]
"""What every side imports: once for all, which saves most of the time that starting them takes."""


@dataclass(frozen=True)
class Side:
    """One way of doing the work.

    ``stream`` is an importable generator function; each ``next`` does one batch of work, the
    reading of the result included, and yields the number of frames in it. ``kwargs`` are its
    arguments; a side with ``ray_address`` is connected to that cluster first and is given
    ``census``, the path of a file in which its actors note their process ids.

    ``processes``: that many copies run at once, and their rates add up. ``group``: only whole
    groups of that many batches are timed (the workers of an async collector deliver in clumps).
    ``ahead``: rollouts that each of ``group`` workers goes on with when a turn ends; they are
    waited for, so that they do not run in another side's turn. ``needs``: a module without which
    the side is left out. ``slow``: one batch takes many seconds, so that there is one turn only, in
    the first round, without a warm-up, and all rounds are compared with it. ``spawns``: another
    library's, which starts workers that import for seconds; a smoke test leaves it out.
    """

    name: str
    stream: Callable[..., Iterator[int]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ray_address: str | None = None
    processes: int = 1
    group: int = 1
    ahead: int = 0
    needs: str | None = None
    slow: bool = False
    spawns: bool = False


@dataclass(frozen=True)
class Turn:
    """What one side did in one turn.

    ``cpu_seconds``: of its process and those below it, without actors. ``peak_rss``: bytes, all its
    processes, up to now.
    """

    frames: int
    seconds: float
    cpu_seconds: float
    peak_rss: int


@dataclass(frozen=True)
class Row:
    """One line of a result table; see ``Race.rows``."""

    case: str
    side: str
    frames_per_second: float
    gigabytes_per_second: float
    peak_rss_megabytes: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    wanted: float | None
    rates: tuple[float, ...]
    frames_per_cpu_second: float
    cpu_ratio: float
    cpu_ratio_lowest: float
    cpu_ratio_highest: float

    @property
    def met(self) -> bool | None:
        """Whether the wanted ratio was reached; None where none is wanted."""
        return None if self.wanted is None else self.ratio >= self.wanted


class Race:
    """A context in which the sides of one case are alive and take turns.

    The first side is ours. ``frame_bytes`` is what one frame counts for in GB/s, the same for
    every side. ``wanted`` maps the name of another side to the least ratio (our rate divided by
    its rate) that is wanted. ``prepared``: sides are warmed up, and run a while untimed before each
    turn; without it nothing but the timed work is done, and the rates mean little.
    """

    def __init__(
        self,
        case: str,
        sides: list[Side],
        *,
        frame_bytes: int,
        wanted: Mapping[str, float],
        seconds: float,
        prepared: bool = True,
    ) -> None:
        self.case = case
        self.frame_bytes = frame_bytes
        self.wanted = dict(wanted)
        self.seconds = seconds
        self.warm_up, self.lead = (WARM_UP * seconds, LEAD) if prepared else (0.0, 0.0)
        self.racers = [_Racer(side) for side in sides if _available(side)]
        self.rates: dict[str, list[float]] = {racer.side.name: [] for racer in self.racers}
        self.cpu_rates: dict[str, list[float]] = {racer.side.name: [] for racer in self.racers}
        self.peaks: dict[str, int] = {racer.side.name: 0 for racer in self.racers}
        self.rounds = 0

    def __enter__(self) -> Self:
        """Start every side, wait until each has delivered a first batch, and warm each up."""
        try:
            for racer in self.racers:
                racer.start()
            for racer in self.racers:
                racer.wait_ready()
            for racer in self.racers:
                if self.warm_up and not racer.side.slow:
                    racer.turn(self.lead, self.warm_up)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop every side."""
        for racer in self.racers:
            racer.ask_to_stop()
        for racer in self.racers:
            racer.stop()

    def round(self) -> None:
        """Let every side have one turn."""
        first = self.rounds % len(self.racers)
        for racer in self.racers[first:] + self.racers[:first]:
            if racer.side.slow and self.rounds > 0:
                continue
            turns = racer.turn(self.lead, self.seconds)
            name = racer.side.name
            self.rates[name].append(sum(turn.frames / turn.seconds for turn in turns))
            frames, cpu_seconds = (
                sum(turn.frames for turn in turns),
                sum(turn.cpu_seconds for turn in turns),
            )
            self.cpu_rates[name].append(frames / cpu_seconds)
            self.peaks[name] = max(self.peaks[name], sum(turn.peak_rss for turn in turns))
        self.rounds += 1

    def rows(self) -> list[Row]:
        """One row per side: medians over the rounds of its rate and of our rate divided by it."""
        rows = []
        for name, rates in self.rates.items():
            ratios, cpu_ratios = self._ratios(self.rates, name), self._ratios(self.cpu_rates, name)
            rate = statistics.median(rates)
            rows.append(
                Row(
                    case=self.case,
                    side=name,
                    frames_per_second=rate,
                    gigabytes_per_second=rate * self.frame_bytes / 1e9,
                    peak_rss_megabytes=self.peaks[name] / 1e6,
                    ratio=statistics.median(ratios),
                    ratio_lowest=min(ratios),
                    ratio_highest=max(ratios),
                    wanted=self.wanted.get(name),
                    rates=tuple(rates),
                    frames_per_cpu_second=statistics.median(self.cpu_rates[name]),
                    cpu_ratio=statistics.median(cpu_ratios),
                    cpu_ratio_lowest=min(cpu_ratios),
                    cpu_ratio_highest=max(cpu_ratios),
                )
            )
        return rows

    def _ratios(self, rates: Mapping[str, list[float]], name: str) -> list[float]:
        """Our rate divided by that side's, of each round."""
        ours, its = rates[self.racers[0].side.name], rates[name]
        rounds = its * len(ours) if len(its) == 1 else its
        return [mine / other for mine, other in zip(ours, rounds, strict=True)]


def _available(side: Side) -> bool:
    """Whether the side's module is installed."""
    from importlib.util import find_spec

    return side.needs is None or find_spec(side.needs) is not None


class _Racer:
    """The processes of one side, seen from the test's process."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.links: list[tuple[multiprocessing.Process, Connection]] = []

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for _ in range(self.side.processes):
            here, there = context.Pipe()
            # The server has the environment of when it was started, before Ray set its variables.
            arguments = (there, self.side, dict(os.environ))
            process = context.Process(target=_serve, args=arguments, name=self.side.name)
            process.start()
            there.close()
            self.links.append((process, here))

    def wait_ready(self) -> None:
        for process, connection in self.links:
            self._answer(process, connection, START_TIMEOUT)

    def turn(self, lead: float, seconds: float) -> list[Turn]:
        for _, connection in self.links:
            connection.send((lead, seconds))
        return [self._answer(process, link, TURN_TIMEOUT) for process, link in self.links]

    def ask_to_stop(self) -> None:
        for _, connection in self.links:
            with contextlib.suppress(OSError):
                connection.send(None)

    def stop(self) -> None:
        for process, connection in self.links:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()

    def _answer(self, process: Any, connection: Connection, timeout: float) -> Any:
        """Wait for what the process has to say; its exception is raised here."""
        if not connection.poll(timeout):
            raise TimeoutError(f"{self.side.name}: no answer within {timeout:.0f} s")
        try:
            answer = connection.recv()
        except EOFError:
            process.join(5)
            raise RuntimeError(
                f"{self.side.name}: the process ended with exit code {process.exitcode}"
            ) from None
        if isinstance(answer, str):
            raise RuntimeError(f"{self.side.name}:\n{answer}")
        return answer


def _serve(connection: Connection, side: Side, environment: Mapping[str, str]) -> None:
    """What a side's process does: build the stream, then run a turn whenever asked."""
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        with tempfile.TemporaryDirectory() as folder:
            kwargs = dict(side.kwargs)
            census = Path(folder, "pids")
            if side.ray_address is not None:
                _connect(side.ray_address)
                kwargs["census"] = str(census)
            with contextlib.closing(side.stream(**kwargs)) as stream:
                next(stream)
                connection.send(0)
                while (turn := connection.recv()) is not None:
                    connection.send(_run(stream, side, *turn, census))
    except BaseException:
        connection.send(traceback.format_exc())


def _connect(address: str) -> None:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="error")


def _run(stream: Iterator[int], side: Side, lead: float, seconds: float, census: Path) -> Turn:
    """One turn: a lead that is not timed, then whole groups of batches for about ``seconds``."""
    if lead:
        _stretch(stream, side.group, lead)
    cpu_before = _cpu_seconds()
    batches, frames, elapsed = _stretch(stream, side.group, seconds)
    cpu_seconds = _cpu_seconds() - cpu_before
    if side.ahead:
        time.sleep(1.2 * side.ahead * elapsed / batches * side.group)
    return Turn(frames, elapsed, cpu_seconds, _peak_rss(census))


def _stretch(stream: Iterator[int], group: int, seconds: float) -> tuple[int, int, float]:
    """Batches, frames and seconds of a stretch of at least ``seconds`` and of one group."""
    batches = frames = 0
    start = time.perf_counter()
    while True:
        for _ in range(group):
            frames += next(stream)
        batches += group
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return batches, frames, elapsed


def _cpu_seconds() -> float:
    """CPU time of this process and of those below it, so far: those that ended do not count.

    The system tells it in steps of 10 ms, of this process exactly.
    """
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def note_process(census: str) -> None:
    """Note this process in a side's census: its memory counts as the side's from now on."""
    with open(census, "a") as file:
        file.write(f"{os.getpid()}\n")


def _peak_rss(census: Path) -> int:
    """Bytes: the largest resident sets of this process and those in the census, added up.

    A page that several processes map counts once in each.
    """
    pids = {os.getpid()}
    if census.exists():
        pids.update(int(line) for line in census.read_text().split())
    return sum(_high_water_mark(pid) for pid in pids)


def _high_water_mark(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0

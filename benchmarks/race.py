"""Measure several ways of doing the same work against each other.

Every *side* runs in its own process, so that its memory is separate, and no side pays for imports
or garbage of another. Only one side runs at a time. A *turn* is a stretch of about the same wall
time for each side. A *round* is one turn of every side, in an order that shifts from round to
round. Rates of the same round are compared, so a machine whose speed changes affects both sides.
The report has the median over the rounds.
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
"""Maximum number of seconds until a side has delivered its first batch."""

TURN_TIMEOUT = 120.0
"""Maximum number of seconds of a turn."""

LEAD = 0.2
"""Seconds that a side runs untimed before a turn, so that its caches and queues are full."""


WARM_UP = 3.0
"""Length of the turn before the first round, in turns. Ray's object store, for example, needs about
a hundred batches of pixels until every process has touched its memory."""


PRELOADED = ["torch", "tensordict.nn", "gymnasium"]
"""Modules to import once for all sides, because imports take most of the time of a start."""


@dataclass(frozen=True)
class Side:
    """One way of doing the work.

    Attributes:
        stream: An importable generator function. Each ``next`` does one batch of work, reads the
            result, and yields the number of frames.
        kwargs: Arguments of `stream`.
        ray_address: Address of a Ray cluster to connect to. `stream` then also gets ``census``, the
            path of a file to which its actors write their process ids.
        processes: Number of copies that run at once; their rates are added.
        group: Number of batches that are timed together, because the workers of an async collector
            deliver in bursts.
        ahead: Number of rollouts that each of `group` workers continues when a turn ends. The side
            waits for them, so that they do not run in another side's turn.
        needs: Module that must be installed; otherwise the side is omitted.
        slow: One batch takes many seconds. The side has a single turn, in the first round and
            without a warm-up, and all rounds are compared with it.
        spawns: Another library's side that starts workers, which import for seconds. A smoke test
            omits it.
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
    """Measurements of one side in one turn.

    Attributes:
        cpu_seconds: CPU time of the side's process and its descendants, without Ray's actors.
        peak_rss: Peak memory of all its processes so far, in bytes.
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
        """Whether the wanted ratio was reached; ``None`` if there is none."""
        return None if self.wanted is None else self.ratio >= self.wanted


class Race:
    """A context in which the sides of one case run and alternate.

    Args:
        case: Name of the case.
        sides: The sides; pycollect's is the first one.
        frame_bytes: Bytes of one frame for GB/s, the same for every side.
        wanted: By name of another side, the wanted minimum of our rate divided by its rate.
        seconds: Length of a turn.
        prepared: Warm up the sides, and run each untimed for a while before each turn (default:
            ``True``). Otherwise only the timed work is done, and the rates mean little.
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
        """Return a row per side, with medians over the rounds of its rate and of the ratio."""
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
        """Return our rate divided by the side's, for each round."""
        ours, theirs = rates[self.racers[0].side.name], rates[name]
        rounds = theirs * len(ours) if len(theirs) == 1 else theirs
        return [mine / other for mine, other in zip(ours, rounds, strict=True)]


def _available(side: Side) -> bool:
    """Return whether the module that a side needs is installed."""
    from importlib.util import find_spec

    return side.needs is None or find_spec(side.needs) is not None


class _Racer:
    """The processes of one side, controlled from the test's process."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.links: list[tuple[multiprocessing.Process, Connection]] = []

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for _ in range(self.side.processes):
            here, there = context.Pipe()
            # The fork server was started before Ray set its environment variables.
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
        """Wait for the process's answer, and return it; raise the process's exception."""
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
    """Run in a side's process: build the stream, then run a turn per request."""
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
    """Run one turn: an untimed lead, then whole groups of batches for about ``seconds``."""
    if lead:
        _stretch(stream, side.group, lead)
    cpu_before = _cpu_seconds()
    batches, frames, elapsed = _stretch(stream, side.group, seconds)
    cpu_seconds = _cpu_seconds() - cpu_before
    if side.ahead:
        time.sleep(1.2 * side.ahead * elapsed / batches * side.group)
    return Turn(frames, elapsed, cpu_seconds, _peak_rss(census))


def _stretch(stream: Iterator[int], group: int, seconds: float) -> tuple[int, int, float]:
    """Run whole groups for at least ``seconds``; return the batches, frames and seconds."""
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
    """Return the CPU time of this process and its living descendants so far.

    The system reports it in steps of 10 ms for descendants, and exactly for this process.
    """
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def note_process(census: str) -> None:
    """Write this process's id to a side's census, so that its memory counts as the side's."""
    with open(census, "a") as file:
        file.write(f"{os.getpid()}\n")


def _peak_rss(census: Path) -> int:
    """Return the sum of the peak resident sets of this process and of the census, in bytes.

    A page that several processes map counts once for each.
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

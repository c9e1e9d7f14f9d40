"""Options, the session's Ray cluster, and the table at the end."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.race import Race, Row, Side

ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the benchmarks."""
    group = parser.getgroup("pycollect benchmarks")
    group.addoption(
        "--smoke",
        action="store_true",
        help="one batch per side, without most libraries that start workers; no figures",
    )
    group.addoption("--rounds", type=int, help="rounds per case (default 7, smoke 1)")
    group.addoption("--turn", type=float, help="seconds per turn (default 0.7, smoke 0)")
    group.addoption(
        "--write-results", action="store_true", help="write benchmarks/results/NAME.{json,md}"
    )
    group.addoption("--results-name", default="results", help="NAME (default: results)")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the list of results, and replace pytest-benchmark's table by our own."""
    config.stash[ROWS] = []
    config.addinivalue_line("markers", "full: a case that a smoke test omits")
    os.environ["RL_LOGGING_LEVEL"] = "WARNING"  # for TorchRL in every process of the session
    # pytest-benchmark's table would show the time of whole rounds, which is meaningless.
    config.option.benchmark_quiet = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Omit cases that differ from another only in a number from a smoke test."""
    if config.getoption("--smoke"):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if item not in full]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the table, and write it with ``--write-results``."""
    rows = config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section("pycollect against its peer and its limit")
    terminalreporter.write_line(report.table(rows))
    if config.getoption("--write-results"):
        arguments = " ".join(config.invocation_params.args)
        stem = Path(__file__).parent / "results" / config.getoption("--results-name")
        report.write(stem, rows, f"python -m pytest {arguments}")


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Address of the local cluster, which every side on Ray joins as a separate driver."""
    import ray

    # Actors import this package, so the repository must come before any other package `benchmarks`.
    root = str(Path(__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    # More CPUs than cores: the actors of all sides are alive at once, but only one side runs.
    context = ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture
def smoke(request: pytest.FixtureRequest) -> bool:
    """Whether this is a smoke test, which only checks that everything runs."""
    return bool(request.config.getoption("--smoke"))


@pytest.fixture
def compare(
    request: pytest.FixtureRequest, benchmark: Callable[..., object], smoke: bool
) -> Callable[..., None]:
    """A function that runs a race, timed by pytest-benchmark, and stores its rows."""
    rounds = request.config.getoption("--rounds") or (1 if smoke else 7)
    seconds = request.config.getoption("--turn") or (0.0 if smoke else 0.7)

    def run(
        case: str, sides: Sequence[Side], *, frame_bytes: int, wanted: Mapping[str, float]
    ) -> None:
        chosen = [side for side in sides if not (smoke and side.spawns)]
        race = Race(
            case,
            chosen,
            frame_bytes=frame_bytes,
            wanted=wanted,
            seconds=seconds,
            prepared=not smoke,
        )
        with race:
            benchmark.pedantic(race.round, rounds=rounds, iterations=1)
        rows = race.rows()
        benchmark.extra_info["rows"] = [asdict(row) for row in rows]
        request.config.stash[ROWS].extend(rows)

    return run

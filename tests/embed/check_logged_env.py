"""Compare batches with the log of their environments; needs the module `logged_env`.

check_logged_env.py FOLDER
"""

import sys
from functools import partial
from pathlib import Path

import logged_env
import torch

from pycollect import MultiSyncDataCollector, SyncDataCollector, _core

ENVS, STEPS, BATCHES = 3, 8, 4


def policy(count: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """Choose actions that depend on all observations."""
    return torch.stack([count[:, 1] * 10 + count[:, 2], level], -1).float()


def logged(folder: Path) -> dict[tuple[int, ...], list[float]]:
    """Return the logged values of each step, by (seed, episode, step)."""
    lines = [line.split() for path in folder.iterdir() for line in path.read_text().splitlines()]
    assert all(line[-1] == "0" for line in lines), "an environment was stepped with the GIL"
    steps = {tuple(map(int, line[:3])): list(map(float, line[3:8])) for line in lines}
    assert len(steps) == len(lines)
    return steps


def delivered(batches: list) -> dict[tuple[int, ...], list[float]]:
    """Return the values of each step in the batches; check ids and done flags."""
    steps: dict[tuple[int, ...], list[float]] = {}
    ids: dict[int, tuple[int, ...]] = {}
    for frame in torch.cat([batch.reshape(-1) for batch in batches]):
        before, after = frame["count"].tolist(), frame["next", "count"].tolist()
        assert after == [before[0], before[1], before[2] + 1]
        assert ids.setdefault(int(frame["collector", "traj_ids"]), before[:2]) == before[:2]
        names = ("reward", "terminated", "truncated")
        outcome = [float(frame["next", name]) for name in names]
        assert bool(frame["next", "done"]) == any(outcome[1:])
        steps[tuple(after)] = [*frame["action"].tolist(), *outcome]
    assert len(ids) == len(set(map(tuple, ids.values())))
    return steps


def check(kind: type, workers: int, folder: Path) -> None:
    """Collect with this class and compare batches with the log."""
    folder.mkdir()
    make = partial(logged_env.Logged, envs=ENVS, path=str(folder / "log"))
    entry = make if workers == 1 else [make] * workers
    frames = workers * ENVS * STEPS
    with kind(entry, policy, frames_per_batch=frames, total_frames=BATCHES * frames) as collector:
        collector.set_seed(1)
        batches = [batch.clone() for batch in collector]
    steps, log = delivered(batches), logged(folder)
    assert len(steps) == BATCHES * frames
    # Workers may have begun their first rollout before they were seeded, so the log may have more.
    assert {step: log[step] for step in steps} == steps
    assert len({step[0] for step in steps}) == workers * ENVS
    print(f"{kind.__name__}: {len(steps)} frames")


def check_an_error(folder: Path) -> None:
    """Check that a C++ exception is raised as its Python counterpart."""
    folder.mkdir()
    with SyncDataCollector(
        logged_env.Logged(envs=1, path=str(folder / "log")),
        lambda level: torch.full((1, 2), 1e7),
        frames_per_batch=4,
    ) as collector:
        try:
            next(iter(collector))
        except IndexError as error:
            print(error)


def check_seeds(folder: Path) -> None:
    """Check that each environment must get a seed."""
    folder.mkdir()
    env = _core.CompiledEnv(logged_env.Logged(envs=3, path=str(folder / "log")))
    for count in (0, 2, 4):
        try:
            env.seed([1] * count)
        except ValueError as error:
            print(str(error).partition(":")[0])


if __name__ == "__main__":
    root = Path(sys.argv[1])
    check(SyncDataCollector, 1, root / "here")
    check(MultiSyncDataCollector, 2, root / "processes")
    check_an_error(root / "error")
    check_seeds(root / "seeds")

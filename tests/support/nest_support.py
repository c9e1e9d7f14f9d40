"""Shared parts of the nest tests: shape and content of a nest's batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from collect_support import FrameOracle
from echo_envs import LENGTHS, EchoEnv

from pycollect import MultiaSyncDataCollector

T = 7  # steps per env and rollout
W = 2  # processes of each nest


@dataclass(frozen=True)
class Inner:
    """Layout of a nest's batches: how its W processes are joined, with P envs each.

    Attributes:
        joined: how their batches are joined; ``None`` if the nest is async.
        envs: P; 0 stands for one env without a batch dimension.
    """

    joined: Any = "stack"
    envs: int = 0

    def __str__(self) -> str:
        return f"{self.joined} of {self.envs}"

    @property
    def shape(self) -> tuple[int, ...]:
        envs = (self.envs,) if self.envs else ()
        if self.joined is None:
            return (*envs, T)
        if self.joined == "stack":
            return (W, *envs, T)
        return (W * self.envs, T) if self.joined == 0 and envs else (*envs, W * T)

    @property
    def frames(self) -> int:
        return max(self.envs, 1) * T * (1 if self.joined is None else W)

    @property
    def arguments(self) -> dict[str, Any]:
        if self.joined is None:
            return {"collector_class": MultiaSyncDataCollector}
        kwargs = {} if self.joined == "stack" else {"cat_results": self.joined}
        return {"collector_class": "sync", "collector_kwargs": kwargs}

    def entries(self, worker: int) -> list[Any]:
        """Return the entries; env p of process w of worker b has the number 10 b + w P + p."""
        count = max(self.envs, 1)
        fns = [partial(EchoEnv, 10 * worker + i, LENGTHS) for i in range(W * count)]
        return [fns[w * count : (w + 1) * count] for w in range(W)] if self.envs else list(fns)

    def rows(self, td: Any, worker: int | None) -> list[tuple[int | None, int, Any]]:
        """Return (worker, env, its frames) in the order in which ids are numbered."""
        assert td.shape == self.shape
        count = max(self.envs, 1)
        if self.joined is None:
            parts = [td]
        elif self.joined == "stack":
            parts = list(td.unbind(0))
        else:
            parts = list(td.chunk(W, 0 if self.joined == 0 and self.envs else td.ndim - 1))
        rows = []
        for w, part in enumerate(parts):
            if self.joined is None:
                w = int(part["observation"].reshape(-1, 3)[0, 0]) % 10 // count
            rows += [(worker, w * count + p, part[p] if self.envs else part) for p in range(count)]
        return rows


INNERS = [Inner(joined, envs) for joined in ("stack", 0, -1, None) for envs in (0, 2)]
STACK, STACK_2, FIRST = Inner("stack"), Inner("stack", 2), Inner(None)


def check_padded(rows: Sequence[tuple[int | None, int, Any]], oracle: FrameOracle) -> list[int]:
    """Check rows that are padded with zeros, and return the number of frames of each."""
    lengths = []
    for worker, env, row in rows:
        length = int(row["collector", "mask"].sum())
        lengths.append(length)
        assert row["collector", "mask"][:length].all()
        behind = row[length:]
        assert (behind["collector", "traj_ids"] == -1).all()
        for key, value in behind.exclude(("collector", "traj_ids")).items(True, True):
            assert not value.any(), key
        oracle.check([(worker, env, row[:length].exclude(("collector", "mask")))])
    return lengths

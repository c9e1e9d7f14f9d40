"""Queue that makes batches of complete trajectories from rollouts, for `trajs_per_batch`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from pycollect.data.extras import ExtrasBatch, with_extras, without_extras
from pycollect.data.frame import TRAJ_IDS
from pycollect.data.layout import Key, dotted
from pycollect.data.slabs import to_tensordict
from pycollect.data.split import split_trajectories, split_with_plan
from pycollect.data.tensordicts import any_done, flatten, restore_nested

Worker = Hashable


class TrajectoryBatch(NamedTuple):
    """N complete trajectories, ordered by the rollout in which they end, then by their start."""

    td: TensorDictBase  # [N, T_max] with ("collector", "mask") if "padded", else [F]
    frames: dict[Any, int]  # number of frames of each worker; the sum is F


class TrajectoryQueue:
    """Keeps open trajectories until they are complete, and complete ones until there are N.

    A trajectory is complete when its done flag is set. It continues in the worker's next rollout,
    with the same id in the same row. If that row has another id, the trajectory was cut and its
    frames are lost, as with `cut` and `clear`. The pushed frames of each worker are always the sum
    of its popped, `held` and lost frames.

    Trajectories get new ids, from 0, when they are popped, so that lost trajectories leave no gaps.
    A pushed rollout is copied. Frames of open trajectories are kept individually; the other frames
    are kept until the last trajectory of their rollout is popped. Not thread-safe, except that any
    thread may read `open_frames`.

    Attributes:
        open_frames: Number of frames of open trajectories.

    Args:
        trajectories: Number of trajectories per batch, N, at least 1.
        form: "padded" or "cat".
        next_id: First new id.
    """

    def __init__(self, trajectories: int, form: str = "padded", next_id: int = 0) -> None:
        self.trajectories = trajectories
        self.form = form
        self.next_id = next_id
        self.open_frames = self.complete_frames = 0
        self._open: dict[tuple[Worker, int, int], _Trajectory] = {}
        self._complete: deque[_Trajectory] = deque()
        self._held: Counter[Worker] = Counter()
        self._frames: Counter[tuple[Worker, int, int]] = Counter()  # frames pushed, by row

    @property
    def complete(self) -> int:
        """Number of complete trajectories that were not popped."""
        return len(self._complete)

    @property
    def held(self) -> dict[Any, int]:
        """Frames of open trajectories and of complete ones that were not popped, by worker."""
        return {worker: frames for worker, frames in self._held.items() if frames}

    def push(self, worker: Worker, rollout: TensorDictBase, source: int = 0) -> int:
        """Add a worker's rollout, in the order of collection.

        Args:
            worker: Key of the worker's counts.
            rollout: [T], or [P, T] with the same P each time. Without trajectory ids, a trajectory
                continues until its done flag. Uncollected cells are not frames.
            source: Index of the process inside the worker; each process has its own rows.

        Returns:
            Number of lost frames, of trajectories that were found to be cut.

        Raises:
            KeyError: The rollout has no done under "next".
            ValueError, TypeError: As in `split_trajectories`.
        """
        flat, plan = split_with_plan(rollout, "cat", prefix=TRAJ_IDS[:-1])
        chunk = _Chunk.of(flat)
        under_next = {key[1:]: leaf for key, leaf in chunk.leaves.items() if key[0] == "next"}
        done = any_done(under_next, 1)
        if done is None:
            raise KeyError("rollout: expected next.done, got none")
        offsets = plan.offsets.tolist()
        complete: list[_Trajectory] = []
        ended = done[plan.offsets[1:] - 1].reshape(-1).tolist()
        known = rollout.get(TRAJ_IDS, None) is not None
        ids = chunk.leaves[TRAJ_IDS][plan.offsets[:-1]].tolist() if known else [None] * plan.count
        self._held[worker] += plan.frames
        lost = 0
        for i, row in enumerate(plan.rows.tolist()):
            place = worker, source, row
            trajectory = self._open.pop(place, None)
            if trajectory is not None and trajectory.id != ids[i]:
                lost += trajectory.frames
                trajectory = None
            trajectory = trajectory or _Trajectory(worker, ids[i], (self._frames[place], row))
            self._frames[place] += offsets[i + 1] - offsets[i]
            trajectory.add(_Piece(chunk, offsets[i], offsets[i + 1]))
            if ended[i]:
                complete.append(trajectory)
            else:
                self._open[place] = trajectory
        for (owner, *_), trajectory in self._open.items():
            if owner == worker:
                trajectory.copy_from(chunk)
        self._complete.extend(sorted(complete, key=lambda trajectory: trajectory.begun))
        self.complete_frames += sum(trajectory.frames for trajectory in complete)
        self._held[worker] -= lost
        self._count_open()
        return lost

    def pop(self, count: int | None = None) -> TrajectoryBatch | None:
        """Return the next N (or `count`) complete trajectories, or ``None`` if there are fewer."""
        count = self.trajectories if count is None else count
        if len(self._complete) < count:
            return None
        taken = [self._complete[i] for i in range(count)]
        lengths = torch.tensor([trajectory.frames for trajectory in taken], device="cpu")
        ids = torch.arange(self.next_id, self.next_id + count, device="cpu")
        pieces = [piece for trajectory in taken for piece in trajectory.pieces]
        td: TensorDictBase = _joined(pieces)
        td.set(TRAJ_IDS, ids.repeat_interleave(lengths).to(td.device or "cpu"))
        td = with_extras(td, _joined_extras(pieces))
        if self.form == "padded":
            td = split_trajectories(td, trajectory_key=TRAJ_IDS)
        frames: Counter[Worker] = Counter()
        for trajectory in taken:
            frames[trajectory.worker] += trajectory.frames
            self._complete.popleft()
        self._held -= frames
        self.complete_frames -= frames.total()
        self.next_id += count
        return TrajectoryBatch(td, dict(frames))

    def cut(self, worker: Worker) -> int:
        """Drop the open trajectories of a worker that died or was reset; return their frames."""
        lost = 0
        for key in [key for key in self._open if key[0] == worker]:
            lost += self._open.pop(key).frames
        self._held[worker] -= lost
        self._count_open()
        return lost

    def clear(self) -> None:
        """Drop all trajectories, at a new seed or at the end."""
        self._open.clear()
        self._complete.clear()
        self.complete_frames = 0
        self._held.clear()
        self._count_open()

    def _count_open(self) -> None:
        self.open_frames = self._held.total() - self.complete_frames


@dataclass(eq=False)
class _Chunk:
    """The frames of a rollout, ordered by trajectory."""

    leaves: dict[Key, torch.Tensor]
    nested: dict[Key, torch.Size]
    device: torch.device | None
    extras_batch: ExtrasBatch

    @classmethod
    def of(cls, td: TensorDictBase) -> _Chunk:
        dense, extras_batch = without_extras(td)
        return cls(*flatten(dense), dense.device, extras_batch)

    def part(self, start: int, stop: int) -> _Chunk:
        """Return a copy of the frames [start, stop)."""
        leaves = {key: leaf[start:stop].clone() for key, leaf in self.leaves.items()}
        return _Chunk(
            leaves,
            self.nested,
            self.device,
            self.extras_batch.moved(torch.arange(start, stop, device="cpu")),
        )


class _Piece(NamedTuple):
    """Frames [start, stop) of a chunk."""

    chunk: _Chunk
    start: int
    stop: int


@dataclass
class _Trajectory:
    """The collected part of a trajectory."""

    worker: Worker
    id: int | None
    begun: tuple[int, int]  # number of earlier frames in its row, and the row
    pieces: list[_Piece] = field(default_factory=list)
    frames: int = 0

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.frames += piece.stop - piece.start

    def copy_from(self, chunk: _Chunk) -> None:
        """Copy this trajectory's frames in a chunk, so that the chunk is not held."""
        for i, (source, start, stop) in enumerate(self.pieces):
            if source is chunk:
                self.pieces[i] = _Piece(chunk.part(start, stop), 0, stop - start)


def _joined(pieces: list[_Piece]) -> TensorDict:
    """Return the frames of all pieces, [F], without their extras."""
    first = pieces[0].chunk
    frames = sum(stop - start for _, start, stop in pieces)
    leaves = {}
    for key, leaf in first.leaves.items():
        parts = [
            chunk.leaves[key][start:stop] for chunk, start, stop in pieces if key in chunk.leaves
        ]
        for part in parts:
            if part.dtype != leaf.dtype or part.shape[1:] != leaf.shape[1:]:
                raise ValueError(
                    f"{dotted(key)}: expected {leaf.dtype} of shape {list(leaf.shape[1:])} in all "
                    f"rollouts, got {part.dtype} of shape {list(part.shape[1:])} in another"
                )
        leaves[key] = torch.cat(parts)
    for chunk, _, _ in pieces:
        if chunk.leaves.keys() != first.leaves.keys():
            odd = next(iter(chunk.leaves.keys() ^ first.leaves.keys()))
            raise ValueError(f"{dotted(odd)}: expected this entry in all rollouts or in none")
    td = to_tensordict(leaves, (frames,), first.device)
    restore_nested(td, first.nested, (frames,), 1)
    return td


def _joined_extras(pieces: list[_Piece]) -> ExtrasBatch:
    """Return the extras of all pieces, with ``None`` if a rollout lacks one."""
    kinds = {key: kind for chunk, _, _ in pieces for key, kind in chunk.extras_batch.kinds.items()}
    extras = {}
    for key in kinds:
        parts = [
            chunk.extras_batch.extras[key][start:stop]
            if key in chunk.extras_batch.extras
            else np.full(stop - start, None, np.object_)
            for chunk, start, stop in pieces
        ]
        extras[key] = np.concatenate(parts)
    return ExtrasBatch(extras, kinds, pieces[0].chunk.extras_batch.classes)

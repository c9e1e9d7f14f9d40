"""Rollouts in, batches of complete trajectories out: what stands behind `trajs_per_batch`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from pycollect.batch.extras_in_batches import Parcel, with_extras, without_extras
from pycollect.batch.frame import TRAJ_IDS
from pycollect.batch.layout import Key, dotted
from pycollect.batch.slab_views import to_tensordict
from pycollect.batch.tensordicts import any_done, flatten, refuse, restore_nested
from pycollect.trajectories.split import split_trajectories, split_with_plan

Worker = Hashable


class TrajectoryBatch(NamedTuple):
    """N complete trajectories: rollout by rollout, those that ended in one as they had begun.

    Attributes:
        td: "padded": [N, T_max] with ``("collector", "mask")``; "cat": [F], one after the other.
        offsets: int64 [N + 1]; in the flat form trajectory i is ``td[offsets[i]:offsets[i + 1]]``.
        lengths: int64 [N].
        frames: how many frames are each worker's; together F.
    """

    td: TensorDictBase
    offsets: torch.Tensor
    lengths: torch.Tensor
    frames: dict[Any, int]


class TrajectoryQueue:
    """Keeps open trajectories until they are complete, and complete ones until N are together.

    A trajectory is complete with its done. It goes on in the worker's next rollout under the same
    id in the same row; where another id comes first it was cut, and its frames are lost, as they
    are with `cut` and `clear`. So for every worker, at any time: the frames pushed are those
    popped, `held`, and lost together.

    Trajectory ids are given anew, from 0, in the order in which trajectories are popped, so that
    those that were lost leave no gaps. A rollout is copied when it is pushed: its memory is not
    held. Frames of open trajectories are held one by one; the others until their rollout's last
    trajectory is popped. Not thread-safe.

    Args:
        trajectories: N, in each batch, at least 1.
        form: "padded" or "cat".
        next_id: the first id that is given.

    Raises:
        ValueError: one of these out of bounds.
    """

    def __init__(self, trajectories: int, form: str = "padded", next_id: int = 0) -> None:
        if trajectories < 1:
            raise ValueError(f"trajectories: expected at least 1, got {trajectories}")
        if form not in ("padded", "cat"):
            raise ValueError(f'form: expected "padded" or "cat", got {form!r}')
        if next_id < 0:
            raise ValueError(f"next_id: expected at least 0, got {next_id}")
        self.trajectories = trajectories
        self.form = form
        self.next_id = next_id
        self._open: dict[tuple[Worker, int, int], _Trajectory] = {}
        self._complete: deque[_Trajectory] = deque()
        self._held: Counter[Worker] = Counter()
        self._frames: Counter[tuple[Worker, int, int]] = Counter()  # of each row, so far

    @property
    def complete(self) -> int:
        """Complete trajectories that were not popped."""
        return len(self._complete)

    @property
    def held(self) -> dict[Any, int]:
        """Frames of open trajectories and of complete ones that were not popped, by worker."""
        return {worker: frames for worker, frames in self._held.items() if frames}

    def push(self, worker: Worker, rollout: TensorDictBase, source: int = 0) -> int:
        """Take a worker's rollout, in the order in which it was collected.

        Args:
            worker: what it is counted under.
            rollout: [T], or [P, T] with the same P each time. Without trajectory ids, a trajectory
                goes on until its done. Uncollected cells are no frames.
            source: which of the worker's own processes it is from: each has rows of its own.

        Returns:
            The frames of trajectories that turned out to be cut, lost now.

        Raises:
            KeyError: no done under "next".
            ValueError, TypeError: as `split_trajectories`.
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
                trajectory.own(chunk)
        self._complete.extend(sorted(complete, key=lambda trajectory: trajectory.begun))
        self._held[worker] -= lost
        return lost

    def pop(self, count: int | None = None) -> TrajectoryBatch | None:
        """The next N, or so many, complete trajectories; None while there are fewer.

        Raises:
            ValueError: they differ in their leaves; nothing was taken.
        """
        count = self.trajectories if count is None else count
        if len(self._complete) < count:
            return None
        taken = [self._complete[i] for i in range(count)]
        lengths = torch.tensor([trajectory.frames for trajectory in taken], device="cpu")
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), lengths.cumsum(0)])
        ids = torch.arange(self.next_id, self.next_id + count, device="cpu")
        pieces = [piece for trajectory in taken for piece in trajectory.pieces]
        td = _joined(pieces)
        td.set(TRAJ_IDS, ids.repeat_interleave(lengths).to(td.device or "cpu"))
        if parcel := _joined_extras(pieces):
            td = with_extras(td, parcel)
        if self.form == "padded":
            td = split_trajectories(td, trajectory_key=TRAJ_IDS)
        frames: Counter[Worker] = Counter()
        for trajectory in taken:
            frames[trajectory.worker] += trajectory.frames
            self._complete.popleft()
        self._held -= frames
        self.next_id += count
        return TrajectoryBatch(td, offsets, lengths, dict(frames))

    def cut(self, worker: Worker) -> int:
        """The worker's open trajectories end here (it died, its envs were reset).

        Returns:
            Their frames, lost now. Its complete trajectories stay.
        """
        lost = 0
        for key in [key for key in self._open if key[0] == worker]:
            lost += self._open.pop(key).frames
        self._held[worker] -= lost
        return lost

    def clear(self) -> dict[Any, int]:
        """Drop everything, at a new seed or at the end.

        Returns:
            The frames that were held, by worker, lost now.
        """
        lost = self.held
        self._open.clear()
        self._complete.clear()
        self._held.clear()
        return lost


@dataclass(eq=False)
class _Chunk:
    """The frames of a rollout, one trajectory after the other."""

    leaves: dict[Key, torch.Tensor]
    nested: dict[Key, torch.Size]
    device: torch.device | None
    parcel: Parcel

    @classmethod
    def of(cls, td: TensorDictBase) -> _Chunk:
        dense, parcel = without_extras(td)
        leaves, nested, others = flatten(dense)
        refuse(others)
        return cls(leaves, nested, dense.device, parcel)

    def part(self, start: int, stop: int) -> _Chunk:
        """Some of the frames, in memory of their own."""
        leaves = {key: leaf[start:stop].clone() for key, leaf in self.leaves.items()}
        return _Chunk(
            leaves,
            self.nested,
            self.device,
            self.parcel.moved(torch.arange(start, stop, device="cpu")),
        )


class _Piece(NamedTuple):
    """Frames [start, stop) of a chunk."""

    chunk: _Chunk
    start: int
    stop: int


@dataclass
class _Trajectory:
    """What there is of a trajectory so far.

    Attributes:
        begun: how many frames of its row were before it, and the row.
    """

    worker: Worker
    id: int | None
    begun: tuple[int, int]
    pieces: list[_Piece] = field(default_factory=list)
    frames: int = 0

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.frames += piece.stop - piece.start

    def own(self, chunk: _Chunk) -> None:
        """Hold the frames in that chunk without holding the chunk."""
        for i, (of, start, stop) in enumerate(self.pieces):
            if of is chunk:
                self.pieces[i] = _Piece(chunk.part(start, stop), 0, stop - start)


def _joined(pieces: list[_Piece]) -> TensorDict:
    """The frames of all pieces, [F], without their extras."""
    first = pieces[0].chunk
    frames = sum(stop - start for _, start, stop in pieces)
    leaves = {}
    for key, leaf in first.leaves.items():
        parts = [of.leaves[key][start:stop] for of, start, stop in pieces if key in of.leaves]
        for part in parts:
            if part.dtype != leaf.dtype or part.shape[1:] != leaf.shape[1:]:
                raise ValueError(
                    f"{dotted(key)}: expected {leaf.dtype} of shape {list(leaf.shape[1:])} in all "
                    f"rollouts, got {part.dtype} of shape {list(part.shape[1:])} too"
                )
        leaves[key] = torch.cat(parts)
    for of, _, _ in pieces:
        if of.leaves.keys() != first.leaves.keys():
            odd = next(iter(of.leaves.keys() ^ first.leaves.keys()))
            raise ValueError(f"{dotted(odd)}: expected in all rollouts or in none")
    td = to_tensordict(leaves, (frames,), first.device)
    restore_nested(td, first.nested, (frames,), 1)
    return td


def _joined_extras(pieces: list[_Piece]) -> Parcel:
    """The extras of all pieces; a rollout that lacks one has none there."""
    kinds = {key: kind for of, _, _ in pieces for key, kind in of.parcel.kinds.items()}
    extras = {}
    for key in kinds:
        parts = [
            of.parcel.extras[key][start:stop]
            if key in of.parcel.extras
            else np.full(stop - start, None, np.object_)
            for of, start, stop in pieces
        ]
        extras[key] = np.concatenate(parts)
    return Parcel(extras, kinds, pieces[0].chunk.parcel.classes)

"""Rollouts that a CUDA graph captures: their steps are kept, and their batch is one block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pycollect.data.layout import Key
from pycollect.data.tensordicts import version_of
from pycollect.data.upload import Packing
from pycollect.policy.calling import CapturedWork
from pycollect.worker.rollout_loop import Calls

if TYPE_CHECKING:
    from pycollect.worker.tensor_recorder import TensorRecorder


class KeptSteps:
    """The tensors of the steps of a rollout, for one copy per leaf at its end.

    Tensors that are written again after their step cannot be kept. The first rollout finds their
    places: a tensor was changed later (torch counts its changes), or a later step returned the same
    memory. In the first rollout every step has to be copied as well; afterwards, only values at
    these places are.
    """

    def __init__(self) -> None:
        self.are_known = False  # whether a rollout has found these places
        self._rewritten: set[int] = set()
        self._steps: list[Sequence[torch.Tensor]] = []
        self._versions: list[list[int]] = []

    def begin(self) -> None:
        """Begin a rollout; drop what an interrupted one has left."""
        self._steps, self._versions = [], []

    def add(self, values: Sequence[torch.Tensor]) -> None:
        if self._rewritten:
            values = [
                value.clone() if place in self._rewritten else value
                for place, value in enumerate(values)
            ]
        self._steps.append(values)
        self._versions.append([version_of(value) for value in values])

    def take(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the values of the rollout by place, and drop them."""
        rewritten = self._find_rewritten()
        steps, self._steps, self._versions = self._steps, [], []
        if self.are_known and rewritten:
            raise RuntimeError(
                "cudagraph_policy: the environment or the policy has written again into a tensor "
                "that it had returned, but not in the rollout before the capture; it needs "
                "cudagraph_policy=False, or metadata without 'cudagraph'"
            )
        self._rewritten |= rewritten
        self.are_known = True
        return list(zip(*steps, strict=True))

    def _find_rewritten(self) -> set[int]:
        found: set[int] = set()
        places: dict[int, set[int]] = {}  # by address
        for values, versions in zip(self._steps, self._versions, strict=True):
            addresses = [value.data_ptr() for value in values]
            for place, (value, version) in enumerate(zip(values, versions, strict=True)):
                if version_of(value) != version or version < 0:
                    found.add(place)
                if earlier := places.get(addresses[place]):
                    found |= {place, *earlier}
            for place, address in enumerate(addresses):
                places.setdefault(address, set()).add(place)
        return found - self._rewritten


class PackedBatch(NamedTuple):
    """A batch in one block of bytes."""

    keys: list[Key]
    packing: Packing  # positions of its tensors in the block
    block: torch.Tensor
    numbers: torch.Tensor  # numbers of the rollout, see `DeviceTrajectories.number`

    def copies(self) -> tuple[dict[Key, torch.Tensor], torch.Tensor]:
        """Return copies of the tensors by key, and of the numbers."""
        views = self.packing.views(self.block.clone())
        return dict(zip(self.keys, views, strict=True)), self.numbers.clone()


def packed(batch: Mapping[Key, torch.Tensor], numbers: torch.Tensor) -> PackedBatch:
    """Return a batch as copies in one block, with the numbers of its rollout."""
    packing = Packing(batch.values())
    block = torch.empty(packing.bytes, dtype=torch.uint8, device=numbers.device)
    for target, source in zip(packing.views(block), batch.values(), strict=True):
        target.copy_(source)
    return PackedBatch(list(batch), packing, block, numbers)


class CapturedRollout:
    """A rollout that a CUDA graph contains, with all its steps and its end.

    Args:
        calls: The functions of a step, which call `act`.
        warmup: Number of rollouts before the capture, at least one.
    """

    def __init__(
        self,
        recorder: TensorRecorder,
        act: Callable[[], Any],
        calls: Calls,
        steps: int,
        warmup: int,
    ) -> None:
        self._recorder, self._plan, self._act = recorder, recorder.plan, act
        roll = partial(_rolled, recorder, KeptSteps(), calls, steps)
        self._work = CapturedWork(roll, recorder.device, warmup)

    def records(self, act: Callable[[], Any]) -> bool:
        """Return whether the graph calls this policy, and writes to the recorder's memory."""
        return self._act is act and self._plan is self._recorder.plan

    def make(self, may_settle_late: bool) -> None:
        """Make a rollout; for `may_settle_late` see `TensorRecorder.recorded`."""
        packed = self._work()
        self._recorder.recorded(packed, may_settle_late and self._work.is_captured)


def _rolled(
    recorder: TensorRecorder, kept: KeptSteps, calls: Calls, steps: int
) -> PackedBatch | None:
    """Make all steps of a rollout and its end, and keep their tensors."""
    recorder.keep_steps(kept)
    for _ in range(steps):
        calls.record(calls.step(calls.take(calls.act())))
    return recorder.complete(packs=True)

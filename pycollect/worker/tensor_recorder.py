"""TensorRecorder: record the steps of environments of tensors on their device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pycollect._core import RolloutControl, RolloutHeader, Slab
from pycollect.data.frame import IS_INIT, MASK, TRAJ_IDS, BatchLeaves
from pycollect.data.layout import Key, is_delivered, torch_dtype
from pycollect.data.tensordicts import rows_like
from pycollect.envs.base import Arrays, BoolArray
from pycollect.envs.tensors import TensorVectorEnv, Transition, with_rows_of
from pycollect.worker.captured import KeptSteps, PackedBatch, packed
from pycollect.worker.device_trajectories import (
    DONE,
    REWARD,
    TERMINATED,
    TRUNCATED,
    DeviceBatches,
    DeviceTrajectories,
    PendingCounts,
    Rollout,
)
from pycollect.worker.report import Episode

if TYPE_CHECKING:
    from pycollect.policy.random_runner import RandomRunner
    from pycollect.policy.runner import PolicyRunner

_Copy = tuple[list[torch.Tensor], list[int]]
"""Targets of one dtype, and the places of their sources among the values of a step."""


class TensorRecorder:
    """Record the steps of P environments on their device, without waiting for it.

    A step is copied to reused memory, [T, P, *frame] for each leaf. The order of a batch, with the
    steps of one environment next to each other, would be far slower to write. `finish` waits once,
    see :class:`DeviceTrajectories`. The class has the methods of :class:`Recorder`.

    The steps of a rollout that a CUDA graph captures are kept, see :class:`KeptSteps`. If the host
    needs no numbers of such a rollout, `finish` does not wait for them, so that the next rollout
    begins without a gap on the device. `settle` or the next `finish` reads them.

    Args:
        current: Current observation by key, [P, *frame]. This class updates it.
        runner: The policy. This class updates its states and collector entries.
        cut: Maximum length of a trajectory; 0: no limit.
        set_truncated: Flag the last frame of every environment in every rollout.

    Attributes:
        plan: The copies of each step of a rollout. A new object if the memory has changed.
    """

    def __init__(
        self,
        env: TensorVectorEnv,
        leaves: BatchLeaves,
        current: Mapping[Key, torch.Tensor],
        runner: PolicyRunner | RandomRunner,
        cut: int,
        set_truncated: bool,
    ) -> None:
        self._env, self._leaves, self._runner = env, leaves, runner
        self._spec = spec = env.spec
        self._cut = cut
        self.device, self._envs = spec.device, spec.num_envs
        self._carried = [(leaf, current[leaf.key]) for leaf in spec.observation]
        self._carried += [(state.leaf, state.current) for state in runner.states]
        self._trajectories = DeviceTrajectories(
            spec.num_envs, spec.device, asked=1 + len(env.mode_evidence)
        )
        self._steps, self._step = 0, 0
        self._roots: list[torch.Tensor | None] = [None] * len(self._carried)
        self.plan: list[list[_Copy]] = []
        self._slab: Slab | None = None
        self._taken: tuple[torch.Tensor, ...] = ()
        self._batch: dict[Key, torch.Tensor] = {}
        self._is_complete = False
        self._numbers = torch.empty(0)
        self._kept: KeptSteps | None = None
        self._firsts: list[torch.Tensor] = []
        self._packed: PackedBatch | None = None
        self._may_settle_late = False
        self._late: PendingCounts | None = None
        self._assembly = DeviceBatches(leaves, spec, set_truncated)
        self._episodes: list[Episode] = []
        self._skips = torch.zeros(spec.num_envs, dtype=torch.bool, device=spec.device)
        self._lacks_final = torch.zeros_like(self._skips)
        self._may_lack_final = False
        self._counts = torch.zeros(spec.num_envs, dtype=torch.int64, device=spec.device)
        self._waits = env.waits_for_device(cut)
        self._counts_steps = bool(cut) or runner.step_count is not None
        self.done: BoolArray = np.zeros(spec.num_envs, np.bool_)
        self._version = self.frames = 0

    @property
    def trajectories(self) -> int:
        return self._trajectories.count

    # Between rollouts

    def restart(self, observation: Arrays) -> None:
        """Start new trajectories after a reset of all environments; see :class:`Recorder`."""
        firsts = [*observation[: len(self._spec.observation)]]
        firsts += [state.initial for state in self._runner.states]
        for (_, current), first in zip(self._carried, firsts, strict=True):
            current.copy_(first)
        self._trajectories.cut()
        self.done[:] = False
        self._skips.zero_()
        self._counts.zero_()
        self._update_entries(self._trajectories.fresh)

    def begin(
        self, slab: Slab, row: int, policy_version: int, control: RolloutControl, steps: int
    ) -> None:
        if steps != self._steps:
            self._make_memory(steps)
        self._slab, self._row, self._control = slab, row, control
        self._step, self._is_complete = 0, False
        self._kept, self._packed, self._may_settle_late = None, None, False
        if policy_version != self._version:
            self._version = policy_version
            self._assembly.policy_version.fill_(policy_version)
        if self._may_lack_final:
            self._lacks_final.zero_()

    def keep_steps(self, kept: KeptSteps) -> None:
        kept.begin()
        self._kept = kept
        self._firsts = [current.clone() for _, current in self._carried]

    def _make_memory(self, steps: int) -> None:
        """Make the memory of rollouts with `steps` steps, and plan the copies of each step."""
        self._steps = steps
        self._memory: dict[Key, torch.Tensor] = {}
        spec, outputs = self._spec, self._leaves.outputs
        following = [leaf for leaf, _ in self._carried[: len(spec.observation)]]
        states = [leaf for leaf, _ in self._carried[len(spec.observation) :]]
        following += [*spec.step_only, *states]
        forms = [(leaf.key, leaf.dtype, leaf.shape) for leaf in outputs]
        forms += [(("next", *leaf.key), leaf.dtype, leaf.shape) for leaf in following]
        forms += [(REWARD, "float32", ()), (TERMINATED, "bool", ()), (TRUNCATED, "bool", ())]
        targets = [self._cells(*form, steps) for form in forms]
        self._keys = [form[0] for form in forms]
        # The observation for the next step is its root, unless the policy writes that entry.
        by_policy = {leaf.key for leaf in outputs}
        self._roots = [
            None
            if leaf.key in by_policy
            else self._cells(leaf.key, leaf.dtype, leaf.shape, steps + 1)
            for leaf, _ in self._carried
        ]
        targets += [None if cells is None else cells[1:] for cells in self._roots]
        self.plan = [
            _copies([None if target is None else target[step] for target in targets])
            for step in range(steps)
        ]
        self._advance = _copies([target for _, target in self._carried])
        self._valid = self._cells(MASK, "bool", (), steps) if spec.skips_after_done else None
        self._counted = self._cells(("step_count",), "int64", (), steps) if self._cut else None

    def _cells(self, key: Key, dtype: str, frame: Sequence[int], steps: int) -> torch.Tensor | None:
        """Return memory [steps, P, *frame] for a leaf; None if batches have no such leaf."""
        if not is_delivered(key) or all(leaf.key != key for leaf in self._leaves.all):
            return None
        shape = (steps, self._envs, *frame)
        cells = torch.zeros(shape, dtype=torch_dtype(dtype), device=self.device)
        self._memory[key] = cells
        return cells

    # A step

    def take(self, values: tuple[torch.Tensor, ...]) -> None:
        """Keep the policy's outputs for `record`; the environment gets copies."""
        self._taken = values

    def record(self, result: Transition) -> int:
        """Record a step; return how many environments have to be reset, see :class:`Recorder`."""
        following, final, step_only, reward, terminated, truncated, ended, lacks_final = result
        if lacks_final is not None:
            self._may_lack_final = True
            self._lacks_final |= lacks_final
        truncated, fresh, resets = self._ended(ended, truncated)
        states = self._runner.states
        outputs = self._taken[: len(self._leaves.outputs)]
        carried = self._taken[len(outputs) : len(outputs) + len(states)]
        first = [
            torch.where(rows_like(fresh, value), state.initial, value)
            for state, value in zip(states, carried, strict=True)
        ]
        begins = (*following, *first)
        rest = (*step_only, *carried, reward, terminated, truncated, *begins)
        if self._kept is not None:
            self._kept.add((*outputs, *(final or following), *rest, ended))
        if self._kept is None or not self._kept.are_known:
            self._copy_step((*outputs, *with_rows_of(following, final, ended), *rest))
        # After all other copies, because an output of the policy may be a view of its input.
        for targets, places in self._advance:
            torch._foreach_copy_(targets, [begins[place] for place in places])
        self._step += 1
        self._control.count_step()
        if self._control.is_stopped and self._step >= self._control.min_steps:
            return -1 - resets
        return resets

    def _copy_step(self, values: Sequence[torch.Tensor]) -> None:
        if self._step == 0:
            for cells, (_, current) in zip(self._roots, self._carried, strict=True):
                if cells is not None:
                    cells[0].copy_(current)
        for targets, places in self.plan[self._step]:
            torch._foreach_copy_(targets, [values[place] for place in places])

    def _ended(
        self, done: torch.Tensor, truncated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return truncation flags, flags of new trajectories, and how many rows to reset."""
        env, step = self._env, self._step
        fresh = ended = done
        if env.spec.skips_after_done:
            assert self._valid is not None
            valid = torch.logical_not(self._skips, out=self._valid[step])
            done = ended = done & valid
            self._skips.copy_(done)
            fresh = done | ~valid
        if self._counted is not None:
            self._counted[step].copy_(self._counts)
            cut = self._counts + 1 >= self._cut
            truncated, done = truncated | cut, done | cut
            fresh = done
        if self._counts_steps:
            self._counts.add_(1).masked_fill_(fresh, 0)
        self._update_entries(fresh)
        if not self._waits:
            return truncated, fresh, 0
        self.done[:] = (done & ~ended if env.resets_itself else done).cpu().numpy()
        return truncated, fresh, int(self.done.sum())

    def _update_entries(self, fresh: torch.Tensor) -> None:
        """Update `is_init` and `step_count`, if the policy reads them."""
        is_init, step_count = self._runner.is_init, self._runner.step_count
        if is_init is not None:
            is_init.copy_(fresh.view(is_init.shape))
        if step_count is not None:
            step_count.copy_(self._counts.view(step_count.shape))

    def reset(self, observation: Arrays) -> None:
        """Begin new trajectories in the environments of `done`; see :class:`Recorder`."""
        rows = torch.from_numpy(self.done).to(self.device)
        firsts = [*observation[: len(self._spec.observation)]]
        firsts += [state.initial for state in self._runner.states]
        for (_, current), first, cells in zip(self._carried, firsts, self._roots, strict=True):
            torch.where(rows_like(rows, current), first, current, out=current)
            if cells is not None:
                cells[self._step].copy_(current)
        if self._slab is None:  # between two rollouts
            self._trajectories.cut(rows)
            self._skips &= ~rows
            self._counts.masked_fill_(rows, 0)
            self._update_entries(self._trajectories.fresh)
        self.done[:] = False

    def recorded(self, packed: PackedBatch, may_settle_late: bool) -> None:
        """Count the steps of a rollout that `complete` has completed.

        Args:
            packed: The result of `complete`; a CUDA graph has written the same tensors again.
            may_settle_late: Whether `finish` need not wait for the numbers of the rollout.
        """
        self._step, self._is_complete, self._packed = self._steps, True, packed
        self._may_settle_late = may_settle_late
        for _ in range(self._steps):
            self._control.count_step()

    # The end of a rollout

    def finish(
        self, worker: int, incarnation: int, sequence: int, others: Sequence[Any] = ()
    ) -> RolloutHeader:
        """Complete the rollout; see :class:`Recorder`."""
        assert self._slab is not None
        if not self._is_complete:
            self.complete()
        numbers = self._numbers
        if self._packed is not None:  # the next rollout writes these tensors again
            self._batch, numbers = self._packed.copies()
        pending = self._trajectories.fetch(numbers)
        self.settle()
        frames, self._late = self._step * self._envs, pending
        if not self._may_settle_late or self._valid is not None or self._may_lack_final:
            frames = self.settle()
        self.frames += frames
        slab, self._slab = self._slab, None
        return slab.write_header(
            self._row, worker, incarnation, sequence, self._version, frames, self._step
        )

    def settle(self) -> int:
        """Wait for the numbers of the last rollout unless known; return its number of frames."""
        if self._late is None:
            return 0
        frames, episodes, (lacks_final, *seen) = self._trajectories.wait(self._late)
        self._late = None
        if lacks_final:
            self._env.report_lacking_final()
        self._env.check_mode(seen)
        self._episodes += episodes
        return frames

    def complete(self, packs: bool = False) -> PackedBatch | None:
        """Compute ids and further entries of the batch on the device, without waiting for it.

        Args:
            packs: Also copy the batch into one block, and return it. A CUDA graph that captures
                this call writes the same block at each replay.
        """
        steps = self._step
        memory = {key: cells[:steps] for key, cells in self._memory.items()}
        if self._kept is not None:
            is_memory_stale = self._kept.are_known
            kept = self._kept.take()
            memory = self._kept_memory(kept) if is_memory_stale else memory
        valid = None if self._valid is None else self._valid[:steps]
        done = memory[TERMINATED] | memory[TRUNCATED]
        if valid is not None:
            done &= valid
        rollout = Rollout(done, memory[REWARD], valid)
        asked = self._lacks_final.any(), *self._env.mode_evidence
        ids, begins, self._numbers = self._trajectories.number(rollout, asked)
        memory = {IS_INIT: begins, **memory, DONE: done, TRAJ_IDS: ids}
        self._batch = self._assembly.batch_of(memory, valid)
        return packed(self._batch, self._numbers) if packs else None

    def _kept_memory(self, kept: Sequence[tuple[torch.Tensor, ...]]) -> dict[Key, torch.Tensor]:
        """Return the leaves of a rollout whose steps were kept, [T, P, *frame] each."""
        *values, ended = kept
        begins = values[len(self._keys) :]
        observations = zip(self._spec.observation, begins, strict=False)
        following: dict[Key, Any] = {("next", *leaf.key): own for leaf, own in observations}
        rows = torch.stack(ended)
        memory = {} if self._valid is None else {MASK: self._valid}
        for key, tensors in zip(self._keys, values, strict=False):
            if key in self._memory:
                memory[key] = torch.stack(tensors)
            if key in memory and key in following:  # last observations were kept for all rows
                (memory[key],) = with_rows_of((torch.stack(following[key]),), (memory[key],), rows)
        for (leaf, _), cells, first, tensors in zip(
            self._carried, self._roots, self._firsts, begins, strict=True
        ):
            if cells is not None:
                memory[leaf.key] = torch.stack((first, *tensors[:-1]))
        return {key: cells.to(self._memory[key].dtype) for key, cells in memory.items()}

    def take_tensors(self) -> dict[Key, torch.Tensor]:
        """Return the leaves of the last rollout by key, [P, T, *frame] each.

        The next rollout may overwrite their memory.
        """
        batch, self._batch = self._batch, {}
        return batch

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def abandon(self) -> None:
        if self._slab is not None and not self._is_complete:
            steps, valid = self._step, self._valid
            self.frames += steps * self._envs if valid is None else int(valid[:steps].sum())
        self._slab = None


def _copies(targets: Sequence[torch.Tensor | None]) -> list[_Copy]:
    """Return the copies of a step by dtype, because torch copies tensors of one dtype at once."""
    by_dtype: dict[torch.dtype, _Copy] = {}
    for place, target in enumerate(targets):
        if target is not None:
            copies = by_dtype.setdefault(target.dtype, ([], []))
            copies[0].append(target)
            copies[1].append(place)
    return list(by_dtype.values())

"""Worker: steps its environments with one policy and records one rollout per request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise, starmap
from typing import Any

import numpy as np
import torch
from tensordict.nn.probabilistic import set_interaction_type

from pycollect._core import RolloutControl, Slab
from pycollect.data.devices import CPU, Devices, indexed, why_not
from pycollect.data.extras import Extras
from pycollect.data.frame import placement_of
from pycollect.data.generators import Generators, GeneratorState
from pycollect.data.weights import Weights, WeightSpec, device_of, load_weights, moved_to
from pycollect.envs.base import EnvBatch
from pycollect.envs.groups import make_groups
from pycollect.envs.make import make_env_batch, registering
from pycollect.policy.remote import RemotePolicy
from pycollect.policy.signature import with_action_spec
from pycollect.worker.env_group import EnvGroup
from pycollect.worker.options import WorkerOptions
from pycollect.worker.report import (
    Episode,
    Lazy,
    RolloutReport,
    StepTimer,
    WorkerSeconds,
    pickled_extras,
)
from pycollect.worker.rollout_loop import roll, roll_alternating
from pycollect.worker.tensor_recorder import TensorRecorder

_NO_CONTROL = RolloutControl()
_UNCHANGED = nullcontext()


class Worker:
    """Environments, in one or two groups, and one policy.

    Args:
        index: Id of the worker, from which seeds derive; recorded in rollout headers.
        policy: Policy in any of the accepted forms, ``None`` for random actions. It is copied if it
            is on another device than the one on which it is called.
        incarnation: Number of earlier workers with this id (default: 0).

    Attributes:
        groups: Groups of these environments, each with its own recorder.
        num_seeds: Number of seeds that a reset of the environments takes.
        batch_size: Batch dimensions of the environments; () for a single environment.
        pre_collect_hook: Function that is called before each rollout. Initially the option's.
    """

    def __init__(
        self,
        index: int,
        entry: Any,
        env_kwargs: dict[str, Any] | None,
        policy: Any,
        options: WorkerOptions,
        incarnation: int = 0,
    ) -> None:
        self.index, self.incarnation = index, incarnation
        self.options = options
        self.pre_collect_hook = options.pre_collect_hook
        self._generators: Generators | None = None
        self._timer = StepTimer()
        self._sequence = 0
        self._must_reset = False  # the last rollout or reset was not completed
        self._fresh = True  # all environments were reset and not stepped since
        if options.init_fn is not None:
            options.init_fn()
        is_remote = isinstance(policy, RemotePolicy)
        as_arrays = is_remote or options.env_groups > 1
        if options.registers and not is_remote:
            entry = registering(entry, policy)
        make = partial(
            make_env_batch,
            create_env_kwargs=env_kwargs,
            autoreset_mode=options.autoreset_mode,
            info_keys=options.info_keys,
            devices=options.devices,
            final_observation=options.final_observation,
            as_arrays=as_arrays,
        )
        self.env = make_groups(entry, options.env_groups, make, remote_policy=is_remote)
        try:
            first = self.env.groups[0]
            policy = with_action_spec(policy, first.spec, first.specs)
            self._policy_device = _policy_device_of(policy, options.devices, first)
            self.policy = moved_to(policy, self._policy_device)
            self._build()
        except BaseException:
            self.env.close()
            raise

    def _build(self) -> None:
        options, envs = self.options, self.env.groups
        cut = options.max_frames_per_traj
        self.num_envs, self.batch_size = self.env.spec.num_envs, self.env.spec.batch_size
        self.num_seeds = self.env.num_seeds
        if cut:
            self.env.check_can_cut()
        cuts = [0 if cut and env.truncate_after(cut) else cut for env in envs]
        if options.set_truncated:
            self.env.check_has_truncated()
        policy, device = self.policy, self._policy_device
        ends = accumulate((env.spec.num_envs for env in envs), initial=0)
        spans = starmap(slice, pairwise(ends))
        with self._settings():
            self.groups = tuple(
                EnvGroup(
                    env,
                    policy.for_group(place) if isinstance(policy, RemotePolicy) else policy,
                    options,
                    device,
                    cut,
                    span,
                    self.num_envs,
                )
                for place, (env, cut, span) in enumerate(zip(envs, cuts, spans, strict=True))
            )
        self.leaves = self.groups[0].leaves
        self.slab_leaves = self.groups[0].slab_leaves
        self.set_share(options.frames)

    def set_share(self, frames: int) -> None:
        """Set the number of frames per rollout, see `WorkerOptions.frames`."""
        self.steps = -(-frames // self.num_envs)
        self.placement = placement_of(self.slab_leaves, self.num_envs, self.steps)

    @property
    def batch_shape(self) -> list[int]:
        """Shape of a rollout: [T] for one environment, [P, T] for a batch."""
        return [*self.batch_size, self.steps]

    @property
    def device(self) -> torch.device:
        return self.env.spec.device

    @property
    def acting_device(self) -> torch.device:
        """Device of the policy, or of the environments if the policy is on the CPU."""
        return self.env.spec.device if self._policy_device == CPU else self._policy_device

    @property
    def weights(self) -> WeightSpec:
        return WeightSpec.of(self.policy)

    @property
    def bounded(self) -> bool:
        """Whether every episode has a maximum length."""
        are_limited = all(env.time_limit for env in self.env.groups)
        return are_limited or bool(self.options.max_frames_per_traj)

    @property
    def seconds(self) -> WorkerSeconds:
        """Seconds that the worker has spent in each part of a rollout."""
        return self._timer.seconds

    @property
    def stepped(self) -> int:
        """Steps of single environments recorded since the worker was made."""
        return sum(group.recorder.frames for group in self.groups)

    @property
    def trajectories(self) -> int:
        """Number of trajectories that were numbered on the environments' device."""
        recorder: TensorRecorder = self.groups[0].recorder
        return recorder.trajectories

    def settle(self) -> list[Episode]:
        """Return the episodes of rollouts whose numbers were still on the device, see `finish`."""
        recorder = self.groups[0].recorder
        if not isinstance(recorder, TensorRecorder):
            return []
        recorder.settle()
        return recorder.take_episodes()

    def collect(
        self,
        slab: Slab,
        row: int,
        policy_version: int,
        random: bool = False,
        control: RolloutControl = _NO_CONTROL,
    ) -> RolloutReport:
        """Record one rollout into a row of a slab.

        If the environment or the policy raises, the exception passes through and the rollout is
        lost. The next rollout begins with a reset of all environments.

        Args:
            slab: Slab of this worker's layout, with P environments and at least T steps. Cells
                after the worker's own T steps are uncollected.
            row: Index of the worker in the slab.
            policy_version: Version to record in the header and, if tracked, with each frame.
            random: Record random actions instead of the policy's; its other outputs are zeros.
            control: Can stop the rollout early, and counts its steps.
        """
        self._timer.begin()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        groups = self.groups
        try:
            with self._settings():
                if self._must_reset or (self.options.reset_at_each_iter and not self._fresh):
                    self._restart()
                self._must_reset, self._fresh = True, False
                for group in groups:
                    group.begin(slab, row, policy_version, control, self.steps, random)
                self._roll(control)
            recorder, *others = (group.recorder for group in groups)
            header = recorder.finish(self.index, self.incarnation, self._sequence, others)
        finally:
            for group in groups:
                group.abandon()
            self._timer.end()
        self._must_reset = False
        self._sequence += 1
        on_device = groups[0].device_recorder
        return RolloutReport(
            header.frames,
            header.policy_version,
            [episode for group in groups for episode in group.recorder.take_episodes()],
            self._timer.seconds,
            self.stepped,
            groups[0].slow_paths,
            self._packed_extras(),
            on_device=on_device.take_tensors() if on_device else {},
        )

    def _packed_extras(self) -> Lazy[Extras] | None:
        if not self.leaves.extras:
            return None
        each = [group.finish_extras(self.steps) for group in self.groups]
        extras = {
            key: np.concatenate([extras_of_group[key] for extras_of_group in each])
            for key in each[0]
        }
        return Lazy(extras, pickled_extras)

    def _roll(self, control: RolloutControl) -> None:
        if len(self.groups) == 1 and self.groups[0].roll_captured(self.steps):
            return
        if len(self.groups) == 1:
            roll(self.groups[0].calls, self._timer, self.steps)
        else:
            self._roll_alternating(control)
        for group in self.groups:
            group.catch_up()

    def _roll_alternating(self, control: RolloutControl) -> None:
        recorder, *others = (group.recorder for group in self.groups)
        roll_alternating(
            [group.alternating_calls for group in self.groups],
            self._timer,
            self.steps,
            lambda: control.is_stopped and recorder.stop(others),
            remote_envs=all(group.env.overlaps for group in self.groups),
            remote_policy=self.groups[0].has_remote_policy,
        )

    def _restart(self, seeds: Sequence[int] | None = None) -> None:
        is_one = len(self.groups) == 1  # whose seeds may be fewer than its environments
        for group in self.groups:
            group.restart(seeds if seeds is None or is_one else seeds[group.span])

    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """Seed all random generators, the environments by `env.num_seeds` seeds, and reset all.

        The other generators depend on `root`. Random actions of environment p come from
        ``SeedSequence(root, spawn_key=(worker, p))``, draws of the policy from ``SeedSequence(root,
        spawn_key=(worker,))``.
        """
        sequence = np.random.SeedSequence(root, spawn_key=(self.index,))
        self._generators = Generators(sequence, self.acting_device)
        self._set_action_generators(
            [
                np.random.default_rng(np.random.SeedSequence(root, spawn_key=(self.index, p)))
                for p in range(self.num_envs)
            ]
        )
        self.reset(seeds)

    def _set_action_generators(self, generators: Sequence[np.random.Generator]) -> None:
        for group in self.groups:
            group.random.rng = generators[group.span]

    def resume(self, state: GeneratorState, seeds: Sequence[int]) -> None:
        """Restore the generators, and reset all environments with `env.num_seeds` seeds."""
        self._generators = Generators.of(state, self.acting_device)
        self._set_action_generators(state.action_generators())
        self.reset(seeds)

    def reset(self, seeds: Sequence[int] | None = None) -> None:
        """Reset all environments; open trajectories end."""
        self._must_reset = True  # if this raises, the next rollout begins with a reset
        for group in self.groups:
            group.runner.forget()
        with self._settings():
            self._restart(seeds)
        self._must_reset, self._fresh = False, True

    def reset_later(self) -> None:
        """Reset all environments at the start of the next rollout; open trajectories end there."""
        self._must_reset = True

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Reset some environments; their open trajectories end."""
        due = self._must_reset
        self._must_reset = True  # if this raises, the next rollout begins with a reset
        with self._settings():
            for group in self.groups:
                first, end = group.span.start, group.span.stop
                group_rows = [row - first for row in rows if first <= row < end]
                if group_rows:
                    group.reset_rows(group_rows)
        self._must_reset = due

    def generator_state(self) -> GeneratorState | None:
        """Return the states of the worker's own generators; ``None`` before it was seeded."""
        generators: list[np.random.Generator] = []
        for group in self.groups:
            rng = group.random.rng
            if rng is None:
                return None
            generators += [rng] if isinstance(rng, np.random.Generator) else rng
        return None if self._generators is None else self._generators.state(generators)

    def load_weights(self, weights: Weights) -> None:
        load_weights(self.policy, weights)

    def close(self) -> None:
        self.env.close()

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Apply the worker's interaction type, thread count and generators, without gradients."""
        options, generators = self.options, self._generators
        with (
            torch.no_grad(),
            set_interaction_type(options.exploration_type),
            _UNCHANGED if generators is None else generators.active(),
            _UNCHANGED if options.num_threads is None else torch_threads(options.num_threads),
        ):
            yield


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads within."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


def _policy_device_of(policy: Any, devices: Devices, env: EnvBatch) -> torch.device:
    """Return the device that the policy is called on; ValueError if it is not available."""
    if isinstance(policy, RemotePolicy):
        return CPU
    device = devices.policy_device or device_of(policy) or env.spec.device
    if reason := why_not(device):
        raise ValueError(
            f"policy: expected parameters on an available device, got {device}: {reason}"
        )
    return indexed(device)

"""Worker: steps one EnvBatch with one policy and records one rollout when asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from tensordict.nn.probabilistic import set_interaction_type

from pycollect._core import Leaf, Recorder, RolloutControl, Slab
from pycollect.batch.extras import pickled_extras
from pycollect.batch.frame import BatchLeaves
from pycollect.batch.layout import Key, dotted
from pycollect.batch.weights import Weights, load_weights, weight_leaves, weights_from, weights_of
from pycollect.devices import CPU, Devices, indexed, why_not
from pycollect.envs import make_env_batch
from pycollect.envs.base import Arrays, EnvBatch
from pycollect.envs.registry import register
from pycollect.policy import (
    Calling,
    PolicyElsewhere,
    PolicyRunner,
    RandomRunner,
    RunnerElsewhere,
    device_of,
    make_policy_runner,
    placed,
    told_of_actions,
)
from pycollect.worker.device_recorder import DeviceRecorder
from pycollect.worker.extras_recorder import ExtrasRecorder
from pycollect.worker.generators import Generators, GeneratorState
from pycollect.worker.memory import current_tensors, fill, placement_of
from pycollect.worker.options import WorkerOptions
from pycollect.worker.packed import Packed
from pycollect.worker.report import RolloutReport
from pycollect.worker.step_timer import StepTimer, WorkerSeconds

Runner = PolicyRunner | RandomRunner | RunnerElsewhere
_NO_CONTROL = RolloutControl()
_AS_IT_IS = nullcontext()
_STOPPED = -1  # what the recorder says of a last step after which no environment is reset


class Worker:
    """One environment batch, one policy and one recorder.

    Attributes:
        options: what it was told.
        pre_collect_hook: called before each rollout, as the options say until another is set.

    Args:
        index: the worker's id, which seeds and rollout headers carry.
        entry: one entry of ``create_env_fn``.
        env_kwargs: for the callables in it.
        policy: in any of the accepted forms, None for random actions. It is copied where it lies
            elsewhere than it is to be called.
        incarnation: how many workers of that id were there before.
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
        self.index = index
        self.incarnation = incarnation
        self.options = options
        self.pre_collect_hook = options.pre_collect_hook
        self._generators: Generators | None = None
        self._timer = StepTimer()
        self._sequence = 0
        self._must_reset = False  # the last rollout was given up on the way
        self._fresh = True  # all environments were reset and not stepped since
        if options.init_fn is not None:
            options.init_fn()
        register(options.registered)
        self.env = make_env_batch(
            entry, env_kwargs, options.autoreset_mode, options.info_keys, options.devices
        )
        try:
            policy = told_of_actions(policy, self.env)
            self._policy_device = _place_of(policy, options.devices, self.env)
            self.policy = placed(policy, self._policy_device)
            self._build(self.env, options)
        except BaseException:
            self.env.close()
            raise

    def _build(self, env: EnvBatch, options: WorkerOptions) -> None:
        cut = options.max_frames_per_traj
        if cut and not env.can_reset:
            raise ValueError(
                "max_frames_per_traj: expected an environment whose sub-environments can be reset "
                "one by one, but this vector environment does not honour reset_mask"
            )
        self._cut = 0 if cut and env.truncate_after(cut) else cut
        if options.set_truncated and not _can_truncate(env):
            raise ValueError(
                "set_truncated: expected an environment with a flag 'truncated', this one has "
                f"{[dotted(leaf.key) for leaf in env.observation]}; call add_truncated_keys() on it"
            )
        staying = env.staying
        self._current = current_tensors(env)
        first = env.reset()
        fill(self._current, first)
        self._extras = ExtrasRecorder(env)
        self._extras.restart()
        with self._settings(), torch.no_grad():
            self._runner: Runner = make_policy_runner(
                self.policy,
                env,
                self._current,
                policy_state=options.policy_state,
                extras=self._extras.current,
                cast=options.cast,
                counts_steps=bool(self._cut),
                calling=_calling_of(self.policy, options, self._policy_device),
                device=self._policy_device,
                home=indexed(env.device) if staying else None,
                told=options.devices.policy_device is not None,
            )
        if isinstance(self._runner, RunnerElsewhere):
            self._current = self._runner.current
        self._extras.outputs = self._runner.extra_outputs
        self._random = (
            self._runner
            if isinstance(self._runner, RandomRunner)
            else RandomRunner(
                env, outputs=(*self._runner.outputs, *self._passed_on()), current=self._current
            )
        )
        self.leaves = BatchLeaves(
            observation=env.observation,
            outputs=self._runner.outputs,
            states=self._state_leaves(),
            step_only=env.step_only,
            root_only=env.root_only,
            own_flags=env.own_flags,
            is_init=self._runner.is_init is not None,
            step_count=bool(self._cut),
            policy_version=options.track_policy_version,
            mask=env.skips_after_done or options.mask,
            dummies=env.skips_after_done,
            extras=self._extras.all,
            nodes=env.nodes,
            compact=options.compact,
        )
        on_host = self.leaves.without(staying) if staying else self.leaves
        self.slab_leaves = on_host if options.stays else self.leaves
        self.steps = -(-options.frames // env.num_envs)
        self.placement = placement_of(self.slab_leaves, env.num_envs, self.steps)
        keys = [leaf.key for leaf in (*self._runner.outputs, *self._passed_on())]
        given = env.given((*self._runner.outputs, *self._runner.through_env))
        places = [keys.index(key) for key in given]
        recorder = self._make_recorder(on_host, () if env.takes_tensors else places)
        states = self._runner.states
        self._there = (
            DeviceRecorder(recorder, env, self.leaves, self._current, states) if staying else None
        )
        self._recorder = self._there or recorder
        self._host_recorder = recorder
        self._recorder.restart(first)
        take = self._recorder.take
        self._take = _taking_tensors(take, places) if env.takes_tensors else take

    def _passed_on(self) -> tuple[Leaf, ...]:
        """What a policy returns behind its outputs: for its own next call, for the env alone."""
        return (*self._state_leaves(), *self._runner.through_env)

    def _state_leaves(self) -> tuple[Leaf, ...]:
        return tuple(state.leaf for state in self._runner.states)

    def _make_recorder(self, leaves: BatchLeaves, given: Sequence[int]) -> Recorder:
        env, options, runner = self.env, self.options, self._runner
        direct = env.direct
        live = set(runner.inputs)
        observations: list[tuple[Key, Any, bool]] = [
            (leaf.key, self._current[leaf.key], leaf.key in live) for leaf in leaves.observation
        ]
        observations += [(leaf.key, None, False) for leaf in env.step_only]
        states = runner.states if leaves.states else ()
        written = {leaf.key for leaf in leaves.all}
        return Recorder(
            self.placement.layout,
            observations,
            [leaf.key for leaf in leaves.outputs],
            envs=env.num_envs,
            batched=env.batched,
            max_frames_per_traj=self._cut,
            skips_after_done=env.skips_after_done,
            set_truncated=options.set_truncated,
            states=[(state.leaf.key, state.current, state.initial) for state in states],
            is_init=runner.is_init,
            step_count=runner.step_count,
            given=given,
            scalars=direct is not None and direct.scalars,
            convert=None if direct is None else direct.convert,
            elsewhere=[leaf.key for leaf in self.slab_leaves.all if leaf.key not in written],
            ends=env.ends,
            rewards=env.rewards,
        )

    def set_share(self, frames: int) -> None:
        """Collect that many frames per rollout from now on, as `WorkerOptions.frames`."""
        self.steps = -(-frames // self.env.num_envs)
        self.placement = placement_of(self.slab_leaves, self.env.num_envs, self.steps)

    @property
    def batch_shape(self) -> list[int]:
        """The env's batch dimensions and time: [T] for one env, [P, T] for a batch."""
        return [*self.env.batch_size, self.steps]

    @property
    def device(self) -> torch.device:
        """Where its environments lie."""
        return self.env.device

    @property
    def _drawing_device(self) -> torch.device:
        """Whose global generator is drawn from: the policy's, else the environments'."""
        return self.env.device if self._policy_device == CPU else self._policy_device

    @property
    def weights(self) -> tuple[Leaf, ...]:
        """Names, dtypes and shapes of the policy's parameters and buffers."""
        return weight_leaves(weights_of(self.policy))

    @property
    def bounded(self) -> bool:
        """Whether its episodes are known to end."""
        return bool(self.options.max_frames_per_traj) or self.env.time_limit

    @property
    def seconds(self) -> WorkerSeconds:
        """Where its time went so far."""
        return self._timer.seconds

    @property
    def stepped(self) -> int:
        """Steps of single environments recorded since the worker was made."""
        return self._recorder.frames

    def collect(
        self,
        slab: Slab,
        row: int,
        policy_version: int,
        random: bool = False,
        control: RolloutControl = _NO_CONTROL,
    ) -> RolloutReport:
        """Record one rollout into that row of a slab.

        An exception of the environment or the policy passes through; the rollout is lost then, and
        the next one begins with a reset of all environments.

        Args:
            slab: of this worker's layout, P envs and T steps, or more: the cells behind its own T
                are uncollected then.
            row: which worker's rows of it.
            policy_version: recorded in the header and, if tracked, with each frame.
            random: random actions instead of the policy's; its other outputs are zeros.
            control: ends the rollout early, if somebody wants that.
        """
        self._timer.begin()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        runner = self._random if random else self._runner
        try:
            with self._settings(), torch.no_grad():
                self._reset_if_due()
                self._must_reset, self._fresh = True, False
                self._recorder.begin(slab, row, policy_version, control, self.steps)
                self._extras.begin()
                runner.refresh(self.steps)
                if isinstance(runner, RunnerElsewhere):
                    runner.begin(control, self._host_recorder.set_policy_version)
                self._roll(runner)
            header = self._recorder.finish(self.index, self.incarnation, self._sequence)
        finally:
            self._recorder.abandon()
            self._timer.end()
        self._must_reset = False
        self._sequence += 1
        return RolloutReport(
            header.frames,
            header.policy_version,
            self._recorder.take_episodes(),
            self._timer.seconds,
            self._recorder.frames,
            self._slow_paths(runner),
            Packed(self._extras.finish(self.steps), pickled_extras) if self.leaves.extras else None,
            on_device=self._there.take_tensors() if self._there else {},
        )

    def _slow_paths(self, runner: Runner) -> tuple[str, ...]:
        slow = {
            "policy_tensordict": runner.slow_path,
            "env_tensordict": self.env.takes_tensors,
            "extras": bool(self.leaves.extras),
        }
        return tuple(name for name, is_slow in slow.items() if is_slow)

    def _restart(self, seeds: Sequence[int] | None = None) -> None:
        self._recorder.restart(self.env.reset(seeds))
        self._extras.restart()

    def _reset_if_due(self) -> None:
        if self._must_reset or (self.options.reset_at_each_iter and not self._fresh):
            self._restart()

    def _roll(self, runner: Runner) -> None:
        act, env_step = runner.act, self._env_step()
        reset_done: Callable[..., Arrays] = self.env.reset_done
        record, record_reset = self._recorder.record, self._recorder.reset
        done, take = self._recorder.done, self._take
        if self.leaves.extras:
            extras = self._extras
            act = extras.beside_act(act, runner.said)
            record, reset_done = extras.beside_step(record), extras.beside_reset(reset_done)
        for plain, then_timed in self._timer.stretches(self.steps):
            for _ in range(plain):
                resets = record(env_step(take(act())))
                if resets:
                    if resets != _STOPPED:
                        record_reset(reset_done(done))
                    if resets < 0:
                        return
            if then_timed and self._timed_step(act, env_step, record, reset_done) < 0:
                return

    def _env_step(self) -> Callable[[Arrays], Sequence[Any]]:
        direct = self.env.direct
        return self.env.step if direct is None else direct.step

    def _timed_step(
        self,
        act: Callable[[], tuple[Any, ...]],
        env_step: Callable[[Arrays], Sequence[Any]],
        record: Callable[..., int],
        reset_done: Callable[..., Arrays],
    ) -> int:
        """One step as all others, with a look at the clock between its parts."""
        timer, clock = self._timer, time.perf_counter
        start = clock()
        values = act()
        chosen = clock()
        result = env_step(self._take(values))
        stepped = clock()
        resets = record(result)
        end = recorded = clock()
        if resets and resets != _STOPPED:
            observation = reset_done(self._recorder.done)
            end = clock()
            self._recorder.reset(observation)
        timer.policy += chosen - start
        timer.env += stepped - chosen + end - recorded
        timer.record += recorded - stepped
        return resets

    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """Seed everything anew and reset all environments.

        Args:
            seeds: of the environments, `env.num_seeds` of them.
            root: random actions of env p come from ``SeedSequence(root, spawn_key=(worker, p))``,
                everything that the policy draws from ``SeedSequence(root, spawn_key=(worker,))``.
        """
        sequence = np.random.SeedSequence(root, spawn_key=(self.index,))
        self._generators = Generators(sequence, self._drawing_device)
        self._random.rng = [
            np.random.default_rng(np.random.SeedSequence(root, spawn_key=(self.index, p)))
            for p in range(self.env.num_envs)
        ]
        self.reset(seeds)

    def resume(self, state: GeneratorState, seeds: Sequence[int]) -> None:
        """Go on with generators that stood so, after a reset with `env.num_seeds` seeds."""
        self._generators = Generators.of(state, self._drawing_device)
        self._random.rng = state.action_generators()
        self.reset(seeds)

    def reset(self, seeds: Sequence[int] | None = None) -> None:
        """Reset all environments; open trajectories end there."""
        self._must_reset = True  # also where this raises
        self._runner.forget()
        with self._settings():
            self._restart(seeds)
        self._must_reset, self._fresh = False, True

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Reset these environments alone; their open trajectories end there.

        Args:
            rows: of P environments.
        """
        done, due = self._recorder.done, self._must_reset
        reset_done: Callable[..., Arrays] = self.env.reset_done
        if self.leaves.extras:
            reset_done = self._extras.beside_reset(reset_done)
        self._must_reset = True  # where this raises
        with self._settings():
            done[list(rows)] = True
            self._recorder.reset(reset_done(done))
        self._must_reset = due

    def generator_state(self) -> GeneratorState | None:
        """Where the worker's own generators stand; None before it was seeded."""
        if self._generators is None:
            return None
        actions = self._random.rng
        if isinstance(actions, np.random.Generator):
            actions = [actions]
        return self._generators.state(actions)

    def load_weights(self, weights: Weights) -> None:
        """Write new weights into the policy, in place."""
        load_weights(weights_from(self.policy), weights)

    def close(self) -> None:
        """Close the environments. Idempotent."""
        self.env.close()

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """The interaction type, thread count and random generators of this worker."""
        options, generators = self.options, self._generators
        with (
            set_interaction_type(options.exploration_type),
            _AS_IT_IS if generators is None else generators.active(),
            _AS_IT_IS if options.num_threads is None else _threads(options.num_threads),
        ):
            yield


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _place_of(policy: Any, devices: Devices, env: EnvBatch) -> torch.device:
    """Where the policy is to be called; ValueError where that is nowhere."""
    if isinstance(policy, PolicyElsewhere):
        return CPU
    device = devices.policy_device or device_of(policy) or env.device
    reason = why_not(device)
    if reason:
        raise ValueError(f"policy: expected parameters on a device, got {device}: {reason}")
    return indexed(device)


def _calling_of(policy: Any, options: WorkerOptions, device: torch.device) -> Calling:
    """How the policy is called; whoever calls one elsewhere knows what is possible there."""
    return options.calling if isinstance(policy, PolicyElsewhere) else options.calling.on(device)


def _can_truncate(env: EnvBatch) -> bool:
    return not env.own_flags or any(leaf.key[-1] == "truncated" for leaf in env.observation)


def _taking_tensors(
    take: Callable[[tuple[Any, ...]], Any], places: Sequence[int]
) -> Callable[[tuple[Any, ...]], Arrays]:
    """`take` for an env that is given tensors: copies too, as it may keep them."""

    def take_tensors(values: tuple[Any, ...]) -> Arrays:
        take(values)
        return tuple([values[place].clone() for place in places])

    return take_tensors

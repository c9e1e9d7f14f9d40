"""EnvGroup: environments that step together, with their policy, recorder and memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from pycollect._core import Layout, Leaf, Placement, Recorder, RolloutControl, Slab, copy
from pycollect.data.devices import CPU, indexed
from pycollect.data.extras import Extras
from pycollect.data.frame import BatchLeaves, NoLeaves
from pycollect.data.layout import Key, torch_dtype
from pycollect.envs.base import Arrays, EnvBatch
from pycollect.envs.tensors import TensorVectorEnv
from pycollect.policy.calling import Calling, CapturedWork
from pycollect.policy.random_runner import RandomRunner
from pycollect.policy.remote import PolicyElsewhere, RunnerElsewhere
from pycollect.policy.runner import PolicyRunner, make_policy_runner
from pycollect.worker.device_recorder import DeviceRecorder
from pycollect.worker.extras_recorder import ExtrasRecorder
from pycollect.worker.options import WorkerOptions
from pycollect.worker.rollout_loop import STOPPED, Calls
from pycollect.worker.tensor_recorder import TensorRecorder, steps_wait


def placement_of(leaves: BatchLeaves | NoLeaves, envs: int, steps: int) -> Placement:
    """Return the placement of a rollout; ValueError if it is larger than this machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        placement = Placement(leaves.layout(), 1, envs, steps)
    except ValueError as error:  # of the slab's size, in bytes
        raise ValueError(f"frames_per_batch: {envs * steps} frames: {error}") from None
    if placement.bytes > memory:
        raise ValueError(
            f"frames_per_batch: {envs * steps} frames take {placement.bytes} bytes, but this "
            f"machine has {memory}; use a smaller frames_per_batch"
        )
    return placement


def current_tensors(env: EnvBatch) -> dict[Key, torch.Tensor]:
    """Memory for the current observation, [*obs] for one env, [P, *obs] for a batch.

    Where the env is for what stays there, else on the CPU, whatever torch's default device is.
    """
    batch = (env.num_envs,) if env.batched else ()
    return {
        leaf.key: torch.zeros(
            (*batch, *leaf.shape),
            dtype=torch_dtype(leaf.dtype),
            device=env.device if leaf.key in env.device_keys else CPU,
        )
        for leaf in env.observation
    }


def fill(current: dict[Key, torch.Tensor], observation: Arrays) -> None:
    """Write an observation into that memory."""
    arrays = observation if isinstance(observation, tuple) else (observation,)
    for tensor, array in zip(current.values(), arrays, strict=False):  # step_only leaves follow
        if tensor.device.type != "cpu":
            tensor.copy_(array)
        else:
            copy(tensor, array if isinstance(array, torch.Tensor) else np.asarray(array))


Runner = PolicyRunner | RandomRunner | RunnerElsewhere


class EnvGroup:
    """Environments that are stepped at once: all that one worker has, or some of them.

    `record_into` follows on its construction; then, for each rollout, `begin`, the calls of
    `calls`, and `catch_up`.

    Attributes:
        env: these environments, which have been reset.
        runner: calls the policy for them; `random` draws actions instead.
        leaves: of a frame.
        recorder: writes them; `beside`, where there is one, what stays on the environments' device.

    Args:
        policy: where it is to be called; or what stands for it in this group.
        device: where that is.
        cut: a trajectory is truncated after so many steps; 0: never.
    """

    def __init__(
        self, env: EnvBatch, policy: Any, options: WorkerOptions, device: torch.device, cut: int
    ) -> None:
        self.env = env
        self._options, self._cut = options, cut
        self._current = current_tensors(env)
        self._first = env.reset()
        fill(self._current, self._first)
        self._extras = ExtrasRecorder(env)
        self._extras.restart()
        self._calling, self._device = _calling_of(policy, options, device), device
        if self._can_capture:
            self._calling = replace(self._calling, within=True)
        self._captured: tuple[Any, Any, Callable[[], Any]] | None = None
        with torch.no_grad():
            self.runner: Runner = make_policy_runner(
                policy,
                env,
                self._current,
                policy_state=options.policy_state,
                extras=self._extras.current,
                cast=options.cast,
                counts_steps=bool(cut),
                calling=self._calling,
                device=device,
                home=indexed(env.device) if env.device_keys else None,
                told=options.devices.policy_device is not None,
            )
        if isinstance(self.runner, RunnerElsewhere):
            self._current = self.runner.current
        self._extras.outputs = self.runner.extra_outputs
        self.random = self._random_runner()
        self.leaves = self._leaves()

    def _random_runner(self) -> RandomRunner:
        if isinstance(self.runner, RandomRunner):
            return self.runner
        outputs = (*self.runner.outputs, *self._passed_on)
        return RandomRunner(self.env, outputs=outputs, current=self._current)

    def _leaves(self) -> BatchLeaves:
        env, options, runner = self.env, self._options, self.runner
        return BatchLeaves(
            observation=env.observation,
            outputs=runner.outputs,
            states=tuple(state.leaf for state in runner.states if state.recorded),
            step_only=env.step_only,
            root_only=env.root_only,
            reward=env.reward,
            own_flags=env.own_flags,
            is_init=runner.is_init is not None,
            step_count=bool(self._cut),
            policy_version=options.track_policy_version,
            mask=env.skips_after_done or options.mask,
            dummies=env.skips_after_done,
            extras=self._extras.all,
            nodes=env.nodes,
            compact=options.compact,
        )

    @property
    def _passed_on(self) -> tuple[Leaf, ...]:
        """What a policy returns behind its outputs: for its own next call, for the env alone."""
        return (*(state.leaf for state in self.runner.states), *self.runner.through_env)

    @property
    def slab_leaves(self) -> BatchLeaves | NoLeaves:
        """Those of a frame that lie in the slab."""
        if not self._options.stays:
            return self.leaves
        if isinstance(self.env, TensorVectorEnv):
            return self.leaves if self.env.device == CPU else NoLeaves()
        return self._on_host

    @property
    def _on_host(self) -> BatchLeaves:
        staying = self.env.device_keys
        return self.leaves.without(staying) if staying else self.leaves

    def record_into(self, layout: Layout, first: int, envs: int) -> None:
        """Make the recorder.

        Args:
            layout: of the slabs.
            first: the place of these environments among all `envs` of the worker.
        """
        env, runner = self.env, self.runner
        keys = [leaf.key for leaf in (*runner.outputs, *self._passed_on)]
        given = env.bind_outputs((*runner.outputs, *runner.through_env))
        places = [keys.index(key) for key in given]
        self.recorder: Any = None
        self.beside: DeviceRecorder | TensorRecorder | None = None
        if isinstance(env, TensorVectorEnv):
            self.recorder = self.beside = self._make_tensor_recorder(env)
        else:
            self.recorder = self._make_recorder(
                layout, () if env.takes_tensors else places, first, envs
            )
            if env.device_keys:
                self.beside = DeviceRecorder(
                    self.recorder, env, self.leaves, self._current, runner.states
                )
        self._records = self.beside or self.recorder
        self._records.restart(self._first)
        del self._first
        take: Callable[..., Any] = self._records.take
        self._take = _taking_tensors(take, places) if env.takes_tensors else take

    def _make_tensor_recorder(self, env: TensorVectorEnv) -> TensorRecorder:
        runner = self.runner
        assert not isinstance(runner, RunnerElsewhere), "those step with arrays"
        return TensorRecorder(
            env, self.leaves, self._current, runner, self._cut, self._options.set_truncated
        )

    def _make_recorder(
        self, layout: Layout, given: Sequence[int], first: int, envs: int
    ) -> Recorder:
        env, runner, leaves = self.env, self.runner, self._on_host
        fast_step = env.fast_step
        falls_behind = self._falls_behind(alone=envs == env.num_envs)
        live = set(runner.inputs)
        observations: list[tuple[Key, Any, bool]] = [
            (leaf.key, self._current[leaf.key], leaf.key in live) for leaf in leaves.observation
        ]
        observations += [(leaf.key, None, False) for leaf in env.step_only]
        states = runner.states if leaves.states else ()
        written = {leaf.key for leaf in leaves.all}
        return Recorder(
            layout,
            observations,
            [leaf.key for leaf in leaves.outputs],
            envs=env.num_envs,
            batched=env.batched,
            max_frames_per_traj=self._cut,
            skips_after_done=env.skips_after_done or falls_behind,
            leaves_out_dummies=falls_behind,
            set_truncated=self._options.set_truncated,
            states=[(own.leaf.key, own.current, own.initial, own.recorded) for own in states],
            is_init=runner.is_init,
            step_count=runner.step_count,
            given=given,
            scalars=fast_step is not None and fast_step.scalars,
            convert=None if fast_step is None else fast_step.convert,
            elsewhere=[leaf.key for leaf in self.slab_leaves.all if leaf.key not in written],
            ends=env.ends,
            rewards=env.rewards,
            all_envs=envs,
            first_env=first,
        )

    def _falls_behind(self, alone: bool) -> bool:
        """Whether what ended is left to reset itself, and steps on alone at the rollout's end.

        To reset it at once would cost a second round trip after nearly every step.

        Not where extras are kept step by step, for all environments at once; nor where groups ask
        a policy elsewhere in turns, which those steps would break.
        """
        in_turns = self.acts_elsewhere and not alone
        return self.env.steps_rows and not self.leaves.extras and not in_turns

    @property
    def acts_elsewhere(self) -> bool:
        """Whether the policy is called elsewhere."""
        return isinstance(self.runner, RunnerElsewhere)

    # A rollout

    def begin(
        self,
        slab: Slab,
        row: int,
        policy_version: int,
        control: RolloutControl,
        steps: int,
        random: bool,
    ) -> None:
        """A rollout begins; arguments as for `Worker.collect`."""
        self._acting = self.random if random else self.runner
        if isinstance(self.runner, RunnerElsewhere):
            self.runner.begin(control, self.recorder.set_policy_version)
        self._records.begin(slab, row, policy_version, control, steps)
        self._extras.begin()
        self._acting.refresh(steps)

    @property
    def calls(self) -> Calls:
        """What a step consists of, until the rollout ends."""
        env, records, runner = self.env, self._records, self._acting
        act, record = runner.act, records.record
        reset_done: Callable[..., Arrays] = env.reset_done
        if self.leaves.extras:
            extras = self._extras
            act = extras.beside_act(act, runner.said)
            record, reset_done = extras.beside_step(record), extras.beside_reset(reset_done)
        fast_step = env.fast_step
        step = env.step if fast_step is None else fast_step.step
        whole = None
        if env.compiled is not None and not self.leaves.extras:
            whole = partial(self.recorder.step_env, env.compiled)
        return Calls(act, self._take, step, record, records.done, reset_done, records.reset, whole)

    @property
    def calls_in_turns(self) -> Calls:
        """The same where another group's are between those of a step."""
        env, runner = self.env, self._acting
        calls = self.calls._replace(overlapped=(env.send, env.receive) if env.overlaps else None)
        if isinstance(runner, RunnerElsewhere):
            return calls._replace(ask=runner.ask)
        if runner.reuses_memory or isinstance(runner, RandomRunner):
            return calls
        return calls._replace(act=_copying(calls.act))

    @property
    def _can_capture(self) -> bool:
        """Whether a CUDA graph may step environments and policy for a whole rollout."""
        env, graphed = self.env, self._calling.graphed
        if graphed is None or not isinstance(env, TensorVectorEnv) or env.device != self._device:
            return False
        return env.is_capturable and not steps_wait(env, self._cut)

    def roll_captured(self, steps: int) -> bool:
        """Make the rollout by replaying a CUDA graph; return False if that is not possible."""
        acting = self._acting
        if not self._calling.within or not isinstance(acting, PolicyRunner):
            return False
        if acting.slow_path or acting.decides_on_host:
            return False
        act, plan = acting.act, self.recorder.plan
        known = self._captured
        if known is None or known[0] is not act or known[1] is not plan:
            known = self._captured = act, plan, self._capture(steps)
        self.recorder.recorded(known[2]())
        return True

    def _capture(self, steps: int) -> Callable[[], Any]:
        act, take, step, record, *_ = self.calls
        recorder = self.recorder

        def roll() -> Any:
            for _ in range(steps):
                record(step(take(act())))
            return recorder.complete(packs=True)

        warmup = max(int((self._calling.graphed or {}).get("warmup", 1)), 1)
        return CapturedWork(roll, self.env.device, warmup)

    def catch_up(self) -> None:
        """Step what fell behind, since it reset itself, until all have the rollout's steps."""
        recorder, env, runner, take = self.recorder, self.env, self._acting, self._take
        if isinstance(env, TensorVectorEnv):
            return
        behind = recorder.behind
        while left := recorder.steps_left:
            runner.refresh(left)
            for _ in range(left):
                resets = recorder.record(env.step_rows(take(runner.act()), behind))
                if resets and resets != STOPPED:
                    recorder.reset(env.reset_done(recorder.done))
                if resets < 0:
                    break

    def abandon(self) -> None:
        """The rollout has ended, in whatever way."""
        self._records.abandon()

    def finish_extras(self, steps: int) -> Extras:
        """What the rollout has beside the slab."""
        return self._extras.finish(steps)

    @property
    def slow_paths(self) -> tuple[str, ...]:
        """The names of those that the rollout took."""
        slow = {
            "policy_tensordict": self._acting.slow_path,
            "env_tensordict": self.env.takes_tensors,
            "extras": bool(self.leaves.extras),
        }
        return tuple(name for name, is_slow in slow.items() if is_slow)

    # Between rollouts

    def restart(self, seeds: Sequence[int] | None) -> None:
        """Reset all environments, with `env.num_seeds` seeds if any."""
        self._records.restart(self.env.reset(seeds))
        self._extras.restart()

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Reset these environments alone."""
        done = self._records.done
        reset_done: Callable[..., Arrays] = self.env.reset_done
        if self.leaves.extras:
            reset_done = self._extras.beside_reset(reset_done)
        done[list(rows)] = True
        self._records.reset(reset_done(done))


def _calling_of(policy: Any, options: WorkerOptions, device: torch.device) -> Calling:
    """How the policy is called; whoever calls one elsewhere knows what is possible there."""
    return options.calling if isinstance(policy, PolicyElsewhere) else options.calling.on(device)


def _taking_tensors(
    take: Callable[[tuple[Any, ...]], Any], places: Sequence[int]
) -> Callable[[tuple[Any, ...]], Arrays]:
    """`take` for an env that is given tensors: copies too, as it may keep them."""

    def take_tensors(values: tuple[Any, ...]) -> Arrays:
        take(values)
        return tuple([values[place].clone() for place in places])

    return take_tensors


def _copying(act: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    """`act`, with results that a call for another group cannot write into."""
    return lambda: tuple([value.clone() for value in act()])

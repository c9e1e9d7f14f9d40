"""EnvGroup: environments that step at once, with their policy, recorder and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pycollect._core import Leaf, Recorder, RolloutControl, Slab
from pycollect.data.devices import CPU, indexed
from pycollect.data.extras import Extras
from pycollect.data.frame import BatchLeaves, NoLeaves
from pycollect.data.layout import Key
from pycollect.envs.base import Arrays, EnvBatch
from pycollect.envs.tensors import TensorVectorEnv
from pycollect.policy.inputs import make_current, write_current
from pycollect.policy.random_runner import RandomRunner
from pycollect.policy.remote import PolicyNeeds, RemotePolicy, RemoteRunner
from pycollect.policy.runner import PolicyRunner
from pycollect.worker.captured import CapturedRollout
from pycollect.worker.device_recorder import DeviceRecorder
from pycollect.worker.extras_recorder import ExtrasRecorder
from pycollect.worker.options import WorkerOptions
from pycollect.worker.rollout_loop import STOPPED, Calls
from pycollect.worker.tensor_recorder import TensorRecorder

Runner = PolicyRunner | RandomRunner | RemoteRunner


class EnvGroup:
    """Environments that are stepped at once: all or some environments of a worker.

    For each rollout, call `begin`, then the functions of `calls` for each step, then `catch_up`.

    Args:
        env: The environments; they are reset.
        policy: The policy, on the device on which it is called, or its `RemotePolicy`.
        cut: Number of steps after which a trajectory is truncated; 0 sets no limit.
        span: Range of these environments among all environments of the worker.
        of: Number of all environments of the worker.

    Attributes:
        random: Draws random actions in place of the policy.
        device_recorder: Records the entries that remain on the environments' device, if any.
    """

    def __init__(
        self,
        env: EnvBatch,
        policy: Any,
        options: WorkerOptions,
        device: torch.device,
        cut: int,
        span: slice,
        of: int,
    ) -> None:
        self.env, self.span = env, span
        self._options, self._cut = options, cut
        self._current = make_current(env.spec)
        first = env.reset()
        write_current(self._current, first)
        self._extras = ExtrasRecorder(env, options.compact)
        self._extras.restart()
        self._call_options, self._device = options.call_options, device
        if not isinstance(policy, RemotePolicy):  # its own process checks its options
            self._call_options = self._call_options.for_device(device)
        if self._can_capture:
            self._call_options = replace(self._call_options, in_captured_rollout=True)
        self._captured: CapturedRollout | None = None
        with torch.no_grad():
            self.runner = self._make_runner(policy)
        if isinstance(self.runner, RemoteRunner):
            self._current = self.runner.current
        self._extras.outputs = self.runner.extra_outputs
        if isinstance(self.runner, RandomRunner):
            self.random = self.runner
        else:
            outputs = (*self.runner.outputs, *self._passed_on)
            self.random = RandomRunner(env, outputs, self._current)
        self.leaves = self._leaves()
        self._make_records(of)
        self._records.restart(first)

    def _make_runner(self, policy: Any) -> Runner:
        spec, options = self.env.spec, self._options
        if policy is None:
            if options.policy_state:
                raise ValueError("policy_state: policy=None has no states; omit policy_state")
            return RandomRunner(self.env)
        needs = PolicyNeeds(
            spec, options.policy_state, bool(self._cut), self._call_options, options.cast
        )
        if isinstance(policy, RemotePolicy):
            return policy.runner(needs, self._current)
        return PolicyRunner(
            policy,
            needs,
            self._current,
            self._extras.current,
            device=self._device,
            output_device=indexed(spec.device) if spec.device_keys else CPU,
            explicit_device=options.devices.policy_device is not None,
        )

    def _leaves(self) -> BatchLeaves:
        spec, options, runner = self.env.spec, self._options, self.runner
        return BatchLeaves(
            observation=spec.observation,
            outputs=runner.outputs,
            states=tuple(state.leaf for state in runner.states if state.recorded),
            step_only=spec.step_only,
            root_only=spec.root_only,
            reward=spec.reward,
            ends=spec.ends,
            is_init=runner.is_init is not None,
            step_count=bool(self._cut),
            policy_version=options.track_policy_version,
            mask=spec.skips_after_done or options.mask,
            dummies=spec.skips_after_done,
            extras=self._extras.all,
            nodes=spec.nodes,
            compact=options.compact,
        )

    @property
    def _passed_on(self) -> tuple[Leaf, ...]:
        """Leaves that a policy returns after its outputs: its states, and the environment's."""
        return (*(state.leaf for state in self.runner.states), *self.runner.through_env)

    @property
    def slab_leaves(self) -> BatchLeaves | NoLeaves:
        """Leaves of a batch that are in the slab."""
        if not self._options.stays:
            return self.leaves
        if isinstance(self.env, TensorVectorEnv):
            return NoLeaves()
        return self._on_host

    @property
    def _on_host(self) -> BatchLeaves:
        staying = self.env.spec.device_keys
        return self.leaves.without(staying) if staying else self.leaves

    def _make_records(self, of: int) -> None:
        env, runner = self.env, self.runner
        keys = [leaf.key for leaf in (*runner.outputs, *self._passed_on)]
        taken = env.bind_outputs((*runner.outputs, *runner.through_env))
        places = [keys.index(key) for key in taken]
        self.recorder: Any = None
        self.device_recorder: DeviceRecorder | TensorRecorder | None = None
        if isinstance(env, TensorVectorEnv):
            assert not isinstance(runner, RemoteRunner), "remote policies need arrays"
            self.recorder = self.device_recorder = TensorRecorder(
                env, self.leaves, self._current, runner, self._cut, self._options.set_truncated
            )
        else:
            self.recorder = self._make_recorder(() if env.spec.takes_tensors else places, of)
            if env.spec.device_keys:
                self.device_recorder = DeviceRecorder(
                    self.recorder, env, self.leaves, self._current, runner.states
                )
        self._records = self.device_recorder or self.recorder
        take: Callable[..., Any] = self._records.take
        self._take = _taking_tensors(take, places) if env.spec.takes_tensors else take

    def _make_recorder(self, given: Sequence[int], of: int) -> Recorder:
        spec, runner, leaves = self.env.spec, self.runner, self._on_host
        fast_step = self.env.fast_step
        # To reset ended environments at once would cost a second round trip after nearly every
        # step. But extras are recorded for all at once, and requests of groups must alternate.
        alternates = self.has_remote_policy and of != spec.num_envs
        falls_behind = self.env.steps_rows and not self.leaves.extras and not alternates
        # With names, the recorder does not call `convert`, which may have to read extras.
        has_names = fast_step is not None and (not spec.extras or self._extras.are_entries)
        live = set(runner.inputs)
        observations: list[tuple[Key, Any, bool]] = [
            (leaf.key, self._current[leaf.key], leaf.key in live) for leaf in leaves.observation
        ]
        observations += [(leaf.key, None, False) for leaf in spec.step_only]
        states = runner.states if leaves.states else ()
        written = {leaf.key for leaf in leaves.all}
        return Recorder(
            self.slab_leaves.layout(),
            observations,
            [leaf.key for leaf in leaves.outputs],
            envs=spec.num_envs,
            batched=bool(spec.batch_size),
            max_frames_per_traj=self._cut,
            skips_after_done=spec.skips_after_done or falls_behind,
            leaves_out_dummies=falls_behind,
            set_truncated=self._options.set_truncated,
            states=[
                (state.leaf.key, state.current, state.initial, state.recorded) for state in states
            ],
            is_init=runner.is_init,
            step_count=runner.step_count,
            given=given,
            scalars=fast_step is not None and fast_step.scalars,
            convert=None if fast_step is None else fast_step.convert,
            names=fast_step.names if fast_step is not None and has_names else (),
            elsewhere=[leaf.key for leaf in self.slab_leaves.all if leaf.key not in written],
            ends=spec.ends,
            rewards=spec.rewards,
            all_envs=of,
            first_env=self.span.start,
        )

    @property
    def has_remote_policy(self) -> bool:
        return isinstance(self.runner, RemoteRunner)

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
        """Begin a rollout; for the arguments see `Worker.collect`."""
        self._acting = self.random if random else self.runner
        if isinstance(self.runner, RemoteRunner):
            self.runner.begin(control, self.recorder.set_policy_version)
        self._records.begin(slab, row, policy_version, control, steps)
        self._extras.begin()
        self._acting.refresh(steps)

    @property
    def calls(self) -> Calls:
        """The functions of a step in this rollout."""
        env, records, runner = self.env, self._records, self._acting
        direct = env.fast_step
        step = env.step if direct is None else direct.step
        act, record = runner.act, records.record
        reset_done: Callable[..., Arrays] = env.reset_done
        if self.leaves.extras:
            extras = self._extras
            act = extras.wrap_act(act, runner.extra_values)
            record = extras.wrap_record(record)
            reset_done = extras.wrap_reset_done(reset_done)
        elif not (env.overlaps or self._cut):
            step, record = env.autoreset_calls(self.recorder) or (step, record)
        whole = None
        if env.compiled is not None and not self.leaves.extras:
            whole = partial(self.recorder.step_env, env.compiled)
        return Calls(act, self._take, step, record, records.done, reset_done, records.reset, whole)

    @property
    def alternating_calls(self) -> Calls:
        """The functions of a step if those of another group are called in between."""
        env, runner = self.env, self._acting
        calls = self.calls
        if env.overlaps:
            calls = calls._replace(overlapped=(env.send, env.receive))
        if isinstance(runner, RemoteRunner):
            return calls._replace(request=runner.request)
        if runner.reuses_memory or isinstance(runner, RandomRunner):
            return calls
        act = calls.act
        # Copies, because calls for another group may overwrite the results.
        return calls._replace(act=lambda: tuple([value.clone() for value in act()]))

    @property
    def _can_capture(self) -> bool:
        """Whether a CUDA graph may contain all steps of a rollout."""
        env, graphed = self.env, self._call_options.graphed
        if graphed is None or not isinstance(env, TensorVectorEnv):
            return False
        on_device = env.spec.device == self._device
        return on_device and env.is_capturable and not env.waits_for_device(self._cut)

    def roll_captured(self, steps: int) -> bool:
        """Make the rollout by replaying a CUDA graph; return False if that is not possible."""
        acting = self._acting
        if not self._call_options.in_captured_rollout or not isinstance(acting, PolicyRunner):
            return False
        if acting.slow_path or acting.decides_on_host:
            return False
        if self._captured is None or not self._captured.records(acting.act):
            warmup = max(int((self._call_options.graphed or {}).get("warmup", 1)), 1)
            self._captured = CapturedRollout(self.recorder, acting.act, self.calls, steps, warmup)
        # Batches that are copied to the host have to wait for the device anyway.
        self._captured.make(may_settle_late=self._options.stays)
        return True

    def catch_up(self) -> None:
        """Step environments that lag because they reset themselves, until every row is full."""
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
        """End the rollout, whether it is complete or not."""
        self._records.abandon()

    def finish_extras(self, steps: int) -> Extras:
        return self._extras.finish(steps)

    @property
    def slow_paths(self) -> tuple[str, ...]:
        """Names of the slow paths that the rollout takes, see ``stats()``."""
        slow = {
            "policy_tensordict": self._acting.slow_path,
            "env_tensordict": self.env.spec.takes_tensors,
            "extras": bool(self.leaves.extras),
        }
        return tuple(name for name, is_slow in slow.items() if is_slow)

    # Between rollouts

    def restart(self, seeds: Sequence[int] | None) -> None:
        """Reset all environments, with `env.num_seeds` seeds unless ``None``."""
        self._records.restart(self.env.reset(seeds))
        self._extras.restart()

    def reset_rows(self, rows: Sequence[int]) -> None:
        done = self._records.done
        reset_done: Callable[..., Arrays] = self.env.reset_done
        if self.leaves.extras:
            reset_done = self._extras.wrap_reset_done(reset_done)
        done[list(rows)] = True
        self._records.reset(reset_done(done))


def _taking_tensors(
    take: Callable[[tuple[Any, ...]], Any], places: Sequence[int]
) -> Callable[[tuple[Any, ...]], Arrays]:
    """Return `take` with copies of the actions, for an environment that may keep tensors."""

    def take_tensors(values: tuple[Any, ...]) -> Arrays:
        take(values)
        return tuple([values[place].clone() for place in places])

    return take_tensors

"""PolicyRunner: any accepted policy as one call per step, `act()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pycollect._core import Leaf
from pycollect.data.cast import ObservationCast
from pycollect.data.devices import CPU
from pycollect.data.extras import Extra, ExtraValues, Kind
from pycollect.data.layout import Key, is_delivered
from pycollect.data.weights import check_on_device
from pycollect.envs.base import EnvBatch
from pycollect.policy.calling import AS_IT_IS, Calling
from pycollect.policy.device_transfer import Crossing
from pycollect.policy.inputs import PolicyInputs
from pycollect.policy.outputs import Raw, casting, check_output_keys, finishers, output_leaves
from pycollect.policy.probe import Probe, source_of
from pycollect.policy.program.compile import Act, assemble
from pycollect.policy.program.exploration import TensorCall, tensor_calls
from pycollect.policy.program.plan import Fingerprint
from pycollect.policy.program.steps import PolicyOutputError, Program, Values, show_all, undisturbed
from pycollect.policy.random_runner import RandomRunner
from pycollect.policy.remote import PolicyElsewhere, RunnerElsewhere
from pycollect.policy.signature import announced_states, called_modules, take_apart, watched_modules
from pycollect.policy.states import IS_INIT, STEP_COUNT, PolicyState
from pycollect.policy.tensordict_call import TensorDictCall


class PolicyRunner:
    """A policy bound to the tensors that hold the current observation.

    Use, for every rollout: `refresh(steps)`, then `act = runner.act`, then `act()` once per step,
    under `torch.no_grad()` and `set_interaction_type(...)`.

    Attributes:
        outputs: the leaves that are recorded, those of the action among them, with the dtypes and
            shapes of one frame of one env; fixed at construction.
        inputs: the observation keys that the policy reads.
        act: calls the policy on the current observation and returns one tensor per output, as rows:
            [*frame] for one env, [P, *frame] for a batch of any shape; actions in the space's
            dtype, where the env asks for it. The tensors may be written again by the next call:
            copy what is to stay. May be another function after `refresh`.
        reuses_memory: True if `act` returns the very same tensors each time.
        slow_path: True if the policy is called with a TensorDict per step.
        states: what the policy passes on to its next call; `act` returns their next values, in this
            order, behind those of `outputs`.
        through_env: next values of states that are the env's own (see `passes_states_on`), with the
            keys ("next", ...); `act` returns them last, for the env alone.
        extra_outputs: what it returns without a fixed shape and numeric dtype, see `said`.
        keeps_states: `act` itself makes the states that it returned the current ones, which lie on
            the policy's device; what is returned is at home, as ever.
    """

    inputs: tuple[Key, ...]
    outputs: tuple[Leaf, ...]
    states: tuple[PolicyState, ...]
    through_env: tuple[Leaf, ...]
    extra_outputs: tuple[Extra, ...]
    slow_path: bool
    reuses_memory: bool
    act: Act

    def __init__(
        self,
        policy: Any,
        env: EnvBatch,
        current: Mapping[Key, torch.Tensor],
        policy_state: Mapping[Any, Any] | None = None,
        extras: ExtraValues | None = None,
        counts_steps: bool = False,
        calling: Calling = AS_IT_IS,
        device: torch.device | None = None,
        home: torch.device | None = None,
        told: bool = False,
        cast: ObservationCast | None = None,
        keeps_states: bool = False,
    ) -> None:
        self.policy = policy
        self._env = env
        self._calling = calling
        device = CPU if device is None else device
        home = CPU if home is None else home
        self._crossing = Crossing(device, home, told)
        self.keeps_states = keeps_states and self._crossing.is_apart
        beside = device if self.keeps_states else home
        self._given = PolicyInputs(env, current, extras, counts_steps, beside, cast)
        self._call = TensorDictCall(self._given, self._crossing)
        check_on_device(policy, device)
        self._tensor_calls: list[TensorCall] = []
        with torch.no_grad():
            self._state_keys = tuple(policy_state or ())
            program = take_apart(policy, env, calling.trusted, self._state_keys)
            forms = announced_states(policy, program, self._given, policy_state)
            probe = Probe(policy, self._given, self._crossing, self._call)
            program, values, self.extra_outputs, self._samples = probe.run(program, forms)
            self.states = self._given.states
            read = self._given.observation if program is None else program.read
            self.inputs = tuple(key for key in read if key in self._given.observation)
            self._others = () if program is None else program.others
            self._sort(values)
            if self.keeps_states:
                places = enumerate(self.states, len(self.outputs))
                self._crossing.keep({place: state.current for place, state in places})
            self._bind(program)
        self.forget()  # values kept from the probe

    @property
    def is_init(self) -> torch.Tensor | None:
        """Bool [1] or [P, 1], which the Recorder keeps true where a trajectory begins.

        None for a policy that does not read it.
        """
        return self._given.own.given.get(IS_INIT)

    @property
    def step_count(self) -> torch.Tensor | None:
        """Int64 [1] or [P, 1], in which the Recorder counts the steps of each trajectory.

        None for a policy that does not read it.
        """
        return self._given.own.given.get(STEP_COUNT)

    def refresh(self, steps: int) -> None:
        """To be called before each rollout of at most `steps` steps.

        Looks whether the policy is still what it was taken for (parameters, hooks, layers, training
        mode) and builds `act` anew if not. Raises ValueError if its output keys have changed.
        """
        if self._fingerprint.still_true() and all(c.is_current() for c in self._tensor_calls):
            return
        check_on_device(self.policy, self._crossing.there)
        with torch.no_grad():
            trusted = self._calling.trusted
            program = take_apart(self.policy, self._env, trusted, self._state_keys)
            self._bind(None if program is None else program.widened(self._others))

    @property
    def decides_on_host(self) -> bool:
        """Whether a part of the policy decides on the host what to do next."""
        return bool(self._tensor_calls)

    @property
    def redraws(self) -> bool:
        """Whether some state begins otherwise in each trajectory."""
        return self._given.are_redrawn

    def forget(self) -> None:
        """Drop the values that the policy keeps for its next call, under private keys."""
        self._call.forget()
        for call in self._tensor_calls:
            call.forget()

    def bring(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies of tensors of the host where the policy is, in one copy; where it is elsewhere."""
        return self._crossing.bring(tensors)

    def said(self) -> ExtraValues:
        """The extra outputs of the last call of `act`, a value per env."""
        return self._call.said

    def _sort(self, values: Values) -> None:
        """What becomes of each value that the policy returns: recorded, carried on, for the env."""
        self._raw = {key: Raw.of(value) for key, value in values.items()}
        self._carried = {state.leaf.key: source_of(state, values) for state in self.states}
        self.through_env = tuple(
            Leaf(("next", *leaf.key), leaf.dtype, leaf.shape)
            for leaf in self._env.observation
            if ("next", *leaf.key) in values and self._env.passes_states_on
        )
        passed_on = {*self._carried.values(), *(leaf.key for leaf in self.through_env)}
        delivered = {
            key: value
            for key, value in values.items()
            if is_delivered(key) and key not in passed_on
        }
        check_output_keys((*delivered, *self._carried), self._env)
        self.outputs = output_leaves(delivered, self._env, self._crossing.there)

    def _bind(self, program: Program | None) -> None:
        """Make `act` for the program, and remember what it rests on."""
        self.slow_path = program is None
        before, self._tensor_calls = self._tensor_calls, tensor_calls(program)
        for call, old in zip(self._tensor_calls, before, strict=False):
            call.take_over(old)
        if program is None:
            self._fingerprint = Fingerprint((), ())
            act, self.reuses_memory = self._act_with_tensordict(), False
        else:
            self._fingerprint = Fingerprint(
                watched_modules(program),
                called_modules(program),
                captured=self._calling.graphed is not None,
            )
            self._check_unchanged(program)
            act, self.reuses_memory = self._act_of(program)
        if self._given.are_redrawn:
            act = self._redrawing(act)
        act = self._given.casting(act, self.inputs)
        cast = casting(act, self.outputs, self._raw)
        self.reuses_memory = self.reuses_memory and cast is act
        self.act = self._given.rows_of(cast)

    def _check_unchanged(self, program: Program) -> None:
        """Check that a policy taken apart reads and writes what it did at construction."""
        known = {*self.inputs, *self._carried, *self._given.own.given}
        unread = [key for key in program.read if key not in known]
        if unread:
            raise PolicyOutputError(
                f"policy: it reads {show_all(unread)}, but in its first call it only read "
                f"{show_all(known)}"
            )
        wanted = self._wanted()
        written = {key for key in program.written if is_delivered(key) or key in wanted}
        written.update(key for key in self._carried.values() if key in self._carried)
        if set(wanted) != written:
            raise PolicyOutputError(
                f"policy: it returned {show_all(wanted)} in its first call, but now "
                f"{show_all(written)}; always return the same keys"
            )

    def _act_of(self, program: Program) -> tuple[Act, bool]:
        """The function that runs the program, and whether it reuses its tensors' memory."""
        given = {key: self._given.tensors[key] for key in program.read}
        crosses = self._crossing.is_needed(given.values())
        given = self._crossing.mirrors(given) if crosses else given
        finish = finishers(self.outputs, self._carried, self._raw, self._given.lead)
        calling, warmup = self._calling, self._calling.graphed or {}
        is_one = crosses and calling.of_calls_alone(program) and self._crossing.can_capture
        if is_one:
            calling = replace(calling, graphed=None)
        with undisturbed(self.policy, self._crossing.there):
            act, reuses_memory = assemble(
                calling.of_program(program), given, self._wanted(), self._samples, finish
            )
        if is_one:
            act = self._crossing.captured(act, pool=calling.pool, **warmup)
        elif crosses:
            act = self._crossing.around(act)
        return act, reuses_memory

    def _act_with_tensordict(self) -> Act:
        wanted = self._wanted()
        given = {*self._carried, *self._given.observation}
        expected = {key for key in wanted if key not in given}
        expected.update(extra.key for extra in self.extra_outputs if extra.kind is not Kind.NODE)
        return self._call.act(
            self._calling.of_whole(self.policy),
            wanted,
            frozenset(expected),
            self.extra_outputs,
            finishers(self.outputs, self._carried, self._raw, self._given.lead),
        )

    def _wanted(self) -> list[Key]:
        """What `act` returns: outputs, then the states' next values, then what the env takes."""
        outputs = (leaf.key for leaf in self.outputs)
        return [*outputs, *self._carried.values(), *(leaf.key for leaf in self.through_env)]

    def _redrawing(self, act: Act) -> Act:
        """Also draw anew how the states of the next trajectories begin."""
        given = self._given

        def act_and_draw() -> tuple[torch.Tensor, ...]:
            outs = act()
            given.redraw()
            return outs

        return act_and_draw


def make_policy_runner(
    policy: Any,
    env: EnvBatch,
    current: Mapping[Key, torch.Tensor],
    rng: np.random.Generator | Sequence[np.random.Generator] | None = None,
    policy_state: Mapping[Any, Any] | None = None,
    extras: ExtraValues | None = None,
    counts_steps: bool = False,
    calling: Calling = AS_IT_IS,
    device: torch.device | None = None,
    home: torch.device | None = None,
    told: bool = False,
    cast: ObservationCast | None = None,
    keeps_states: bool = False,
) -> PolicyRunner | RandomRunner | RunnerElsewhere:
    """A runner for a policy in any of the accepted forms.

    Args:
        policy: a TensorDictModuleBase; an nn.Module or callable over tensors, which returns the
            action(s); a callable that takes a TensorDict; what stands for one elsewhere; None for
            random actions.
        env: whose leaves and batch shape the policy has to fit.
        current: one tensor per observation key, [*frame] for one env, [P, *frame] for a batch, that
            always holds the current observation: whoever collects writes into it. A first
            observation has to be there already.
        rng: for random actions, one or one per env; ignored where there is a policy.
        policy_state: shapes of one env, or first values, of the policy's states by key, for those
            that neither a primer nor an RNN layer of the policy tells.
        extras: the current observation's, kept up to date like `current`.
        counts_steps: whoever collects counts the steps of each trajectory in `step_count`.
        calling: whether its modules are compiled or captured.
        device: where its parameters lie; None: on the CPU.
        home: where the policy's states and what `act` returns lie; None: on the CPU.
        told: the caller named that device, so that TensorDicts for the policy say it.
        cast: of observations, which the policy reads as they are delivered; None: as they are.
        keeps_states: states pass from call to call on the policy's device, where that is not home;
            whoever collects writes into them where they are to be others.

    The policy is called once, on copies, with the interaction type that is set at the time, to
    learn its outputs; distributions of known kinds and chains of known layers are called more often
    to prove their fast forms. Random generators and buffers are put back. Training mode is left
    as it is.

    Raises ValueError, TypeError or NotImplementedError that name the key, what was expected and
    what came.
    """
    if policy is None:
        if policy_state:
            raise ValueError("policy_state: policy=None has no states; omit policy_state")
        return RandomRunner(env, rng)
    if isinstance(policy, PolicyElsewhere):
        return policy.runner(env, current, policy_state, counts_steps, calling, cast)
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            f"policy: expected a TensorDictModule, an nn.Module, a callable or None, got {policy!r}"
        )
    return PolicyRunner(
        policy,
        env,
        current,
        policy_state,
        extras,
        counts_steps,
        calling,
        device,
        home,
        told,
        cast,
        keeps_states,
    )


def build(factory: Callable[[], Any]) -> Any:
    """What the factory returns; TypeError if that is no policy."""
    policy = factory()
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            f"policy_factory: expected a function that returns a module or a callable, but it "
            f"returned {policy!r}"
        )
    return policy

"""PolicyRunner: call any accepted policy once per step, by `act()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pycollect._core import Leaf
from pycollect.data.devices import CPU
from pycollect.data.extras import Extra, ExtraValues, Kind
from pycollect.data.layout import Key, is_delivered, show_all
from pycollect.data.weights import named_tensors
from pycollect.policy.calling import keep_freed_memory
from pycollect.policy.device import DeviceTransfer
from pycollect.policy.inputs import PolicyInputs, TensorDictCall
from pycollect.policy.outputs import (
    RawOutput,
    casting,
    check_output_keys,
    checking_dtypes,
    finishers,
    output_leaves,
)
from pycollect.policy.probe import Probe, source_of
from pycollect.policy.program.compile import Act, assemble
from pycollect.policy.program.exploration import TensorCall, tensor_calls
from pycollect.policy.program.plan import Fingerprint, autocasts
from pycollect.policy.program.steps import PolicyOutputError, Program, Values, preserve_state
from pycollect.policy.remote import PolicyNeeds
from pycollect.policy.signature import called_modules, declared_states, to_program, watched_modules
from pycollect.policy.states import IS_INIT, STEP_COUNT, PolicyState


class PolicyRunner:
    """A policy bound to the tensors that hold the current observation.

    Use, for every rollout: `refresh(steps)`, then `act = runner.act`, then `act()` once per step,
    under `torch.no_grad()` and `set_interaction_type(...)`.

    The constructor calls the policy once, on copies and with the current interaction type, to learn
    its outputs. Known distributions and chains of known layers are called more often, to check that
    their fast forms return the same values. Random generators and buffers are restored afterwards,
    and the training mode does not change.

    Args:
        policy: A TensorDictModuleBase; an nn.Module or callable over tensors that returns the
            action(s); a callable that takes a TensorDict.
        current: Current observation by key, [*frame] for one environment, [P, *frame] for a batch.
            It holds a first observation; the recorder updates it.
        extras: Extras of the current observation, updated like `current`.
        device: Device of the policy's parameters (default: the CPU).
        output_device: Device of the policy's states and of the outputs of `act` (default: the CPU).
        explicit_device: The caller has passed `device`, so TensorDicts for the policy have it.
        keeps_states: Keep states on the policy's device from call to call, if that is not the
            output device. To change a state, the caller writes into it.

    Raises:
        ValueError: The policy's inputs or outputs do not fit; the message names the key.
        TypeError: The policy or one of its arguments has an unsupported type.
        NotImplementedError: The policy uses an unsupported feature.

    Attributes:
        outputs: Leaves to record, including actions, with dtype and shape of one environment's
            frame; fixed at construction.
        inputs: Observation keys that the policy reads.
        act: Calls the policy on the current observation and returns one tensor per output, as rows:
            [*frame] for one environment, [P, *frame] for a batch of any shape. Actions are cast to
            the action space's dtype if the environment needs that. The next call may overwrite the
            tensors. `refresh` may replace the function.
        reuses_memory: Whether `act` returns the same tensor objects each time.
        slow_path: Whether the policy is called with a TensorDict per step.
        states: States that the policy passes to its next call. `act` returns their next values
            after `outputs`, in this order.
        through_env: Next values of states that the environment passes on (see `passes_states_on`),
            with keys ("next", ...). `act` returns them last; only the environment uses them.
        extra_outputs: Outputs without a fixed shape and numeric dtype, see `extra_values`.
        keeps_states: Whether `act` itself updates the current states, on the policy's device. It
            returns their next values on the output device all the same.
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
        needs: PolicyNeeds,
        current: Mapping[Key, torch.Tensor],
        extras: ExtraValues | None = None,
        device: torch.device = CPU,
        output_device: torch.device = CPU,
        explicit_device: bool = False,
        keeps_states: bool = False,
    ) -> None:
        if not callable(policy) or isinstance(policy, type):
            raise TypeError(
                "policy: expected a TensorDictModule, an nn.Module, a callable or None, got "
                f"{policy!r}"
            )
        self.policy = policy
        self._env, self._call_options = needs.env, needs.call_options
        self._transfer = DeviceTransfer(device, output_device, explicit_device)
        self.keeps_states = keeps_states and self._transfer.is_separate
        state_device = device if self.keeps_states else output_device
        self._policy_inputs = PolicyInputs(needs, current, extras, state_device)
        self._call = TensorDictCall(self._policy_inputs, self._transfer)
        _check_on_device(policy, device)
        self._tensor_calls: list[TensorCall] = []
        self.slow_path = False
        self._autocasts = autocasts()
        keep_freed_memory()
        with torch.no_grad():
            self._state_keys = tuple(needs.policy_state or ())
            program = self._to_program()
            forms = declared_states(policy, program, self._policy_inputs, needs.policy_state)
            probe = Probe(policy, self._policy_inputs, self._transfer, self._call)
            program, values, self.extra_outputs, self._samples = probe.run(program, forms)
            self.states = self._policy_inputs.states
            read = self._policy_inputs.observation if program is None else program.read
            self.inputs = tuple(key for key in read if key in self._policy_inputs.observation)
            self._others = () if program is None else program.others
            self._sort(values)
            if self.keeps_states:
                places = enumerate(self.states, len(self.outputs))
                self._transfer.store_outputs({place: state.current for place, state in places})
            self._bind(program)
        self.forget()  # values kept from the probe

    @property
    def is_init(self) -> torch.Tensor | None:
        """Whether a trajectory begins, bool [1] or [P, 1]; the Recorder updates it.

        ``None`` if the policy does not read it.
        """
        return self._policy_inputs.collector_entries.tensors.get(IS_INIT)

    @property
    def step_count(self) -> torch.Tensor | None:
        """Number of steps in each trajectory, int64 [1] or [P, 1]; the Recorder updates it.

        ``None`` if the policy does not read it.
        """
        return self._policy_inputs.collector_entries.tensors.get(STEP_COUNT)

    def refresh(self, steps: int) -> None:
        """Prepare for a rollout of at most `steps` steps.

        Rebuilds `act` if the policy has changed (its parameters, hooks, layers or training mode),
        or if autocast was entered or left.
        """
        is_current = self._fingerprint.is_current() and all(
            call.is_current() for call in self._tensor_calls
        )
        if is_current:
            return
        if self.slow_path:  # a call with a TensorDict sees all changes of the policy
            self._bind(None)
            return
        _check_on_device(self.policy, self._transfer.device)
        with torch.no_grad():
            program = self._to_program()
            self._bind(None if program is None else program.with_outputs(self._others))

    def _to_program(self) -> Program | None:
        trusted = self._call_options.trusted
        return to_program(self.policy, self._env, trusted, self._state_keys)

    @property
    def decides_on_host(self) -> bool:
        """Whether a part of the policy decides on the host how to continue."""
        return bool(self._tensor_calls)

    @property
    def has_random_states(self) -> bool:
        return self._policy_inputs.has_random_states

    @property
    def kept(self) -> dict[Key, Any]:
        """Values that the last call wrote for the next one, by key; rows as in `act`'s inputs."""
        if self.slow_path:
            return self._call.kept
        return {key: value for call in self._tensor_calls for key, value in call.kept.items()}

    @kept.setter
    def kept(self, values: Mapping[Key, Any]) -> None:
        self._call.kept = dict(values)
        for call in self._tensor_calls:
            call.kept = {key: values[key] for key in call.kept_keys if key in values}

    def forget(self) -> None:
        """Drop the values that the last call wrote for the next one."""
        self.kept = {}

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return copies of host tensors on the policy's device, which must not be the CPU."""
        return self._transfer.send(tensors)

    def extra_values(self) -> ExtraValues:
        """Return the extra outputs of the last call of `act`, with a value per environment."""
        return self._call.extra_values

    def _sort(self, values: Values) -> None:
        """Sort the policy's outputs into recorded ones, states, and values for the environment."""
        self._raw = {key: RawOutput.of(value) for key, value in values.items()}
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
        self.outputs = output_leaves(delivered, self._env, self._transfer.device)

    def _bind(self, program: Program | None) -> None:
        """Make `act` for the program, and a fingerprint that detects changes of the policy."""
        kept = self.kept
        self.slow_path, self._tensor_calls = program is None, tensor_calls(program)
        self.kept = kept
        if program is None:
            self._fingerprint = Fingerprint((), ())
            act, self.reuses_memory = self._act_with_tensordict(), False
        else:
            is_captured = self._call_options.graphed is not None
            is_captured &= isinstance(self.policy, nn.Module)
            captured = tuple(self.policy.modules()) if is_captured else ()
            self._fingerprint = Fingerprint(
                watched_modules(program), called_modules(program), captured
            )
            self._check_unchanged(program)
            act, self.reuses_memory = self._act_of(program)
        if autocasts() != self._autocasts:
            act = checking_dtypes(act, self._wanted(), self._raw)
        if self._policy_inputs.has_random_states:
            act = self._drawing_states(act)
        act = self._policy_inputs.casting(act, self.inputs)
        cast = casting(act, self.outputs, self._raw)
        self.reuses_memory = self.reuses_memory and cast is act
        self.act = self._policy_inputs.rows_of(cast)

    def _check_unchanged(self, program: Program) -> None:
        """Check that the program reads and writes the same keys as at construction."""
        known = {*self.inputs, *self._carried, *self._policy_inputs.collector_entries.tensors}
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
        """Return the function that runs the program, and whether it reuses its tensors' memory."""
        tensors = {key: self._policy_inputs.tensors[key] for key in program.read}
        crosses = self._transfer.is_needed(tensors.values())
        tensors = self._transfer.mirrors(tensors) if crosses else tensors
        finish = finishers(self.outputs, self._carried, self._raw, self._policy_inputs.lead)
        call_options, warmup = self._call_options, self._call_options.graphed or {}
        captures_step = (
            crosses and call_options.can_capture_step(program) and self._transfer.can_capture
        )
        if captures_step:
            call_options = replace(call_options, graphed=None)
        with preserve_state(self.policy, self._transfer.device):
            act, reuses_memory = assemble(
                call_options.wrap_program(program), tensors, self._wanted(), self._samples, finish
            )
        if captures_step:
            act = self._transfer.capture(act, pool=call_options.pool, **warmup)
        elif crosses:
            act = self._transfer.wrap(act)
        return act, reuses_memory

    def _act_with_tensordict(self) -> Act:
        wanted = self._wanted()
        tensors = {*self._carried, *self._policy_inputs.observation}
        expected = {key for key in wanted if key not in tensors}
        expected.update(extra.key for extra in self.extra_outputs if extra.kind is not Kind.NODE)
        return self._call.act(
            self._call_options.compile(self.policy),
            wanted,
            frozenset(expected),
            self.extra_outputs,
            finishers(self.outputs, self._carried, self._raw, self._policy_inputs.lead),
        )

    def _wanted(self) -> list[Key]:
        """Return the keys of the tensors that `act` returns, in their order."""
        outputs = (leaf.key for leaf in self.outputs)
        return [*outputs, *self._carried.values(), *(leaf.key for leaf in self.through_env)]

    def _drawing_states(self, act: Act) -> Act:
        """Return `act` with a draw of the next trajectories' first states after each call."""
        inputs = self._policy_inputs

        def act_and_draw() -> tuple[torch.Tensor, ...]:
            outs = act()
            inputs.draw_initial_states()
            return outs

        return act_and_draw


def _check_on_device(policy: Any, device: torch.device) -> None:
    """Raise a ValueError for the first parameter or buffer on another device."""
    for name, tensor in named_tensors(policy):
        if tensor.device != device:
            raise ValueError(
                f"policy: expected its parameters on {device}, but {name!r} is on "
                f"{tensor.device}; pass policy_device"
            )

"""Inputs of a policy: observation, states and other entries, as tensors or as a TensorDict."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from pycollect._core import copy
from pycollect.data.devices import CPU
from pycollect.data.extras import Extra, ExtraValues, Kind, read_values, with_current
from pycollect.data.layout import Key, as_key, is_delivered, show_all, torch_dtype
from pycollect.data.objects import is_object
from pycollect.envs.base import Arrays, EnvSpec
from pycollect.policy.device import DeviceTransfer
from pycollect.policy.program.compile import Act, Finishers
from pycollect.policy.program.steps import PolicyOutputError
from pycollect.policy.remote import PolicyNeeds
from pycollect.policy.states import CollectorEntries, PolicyState, StateForm


class PolicyInputs:
    """The memory that a policy reads at each step. The recorder updates it between steps.

    For the arguments see :class:`PolicyRunner`; `current` may contain more entries.

    Attributes:
        lead: Batch dimensions of every tensor, as of the environment: (), (P,), or for example
            (a, b) with P = a * b.
        observation: Observations by key. The function that `casting` returns updates cast ones.
        tensors: Tensors that the policy may read: observations, states and collector entries.
        collector_entries: Entries that the collector can add.
        states: States that the policy passes to its next call.
    """

    states: tuple[PolicyState, ...] = ()

    def __init__(
        self,
        needs: PolicyNeeds,
        current: Mapping[Key, torch.Tensor],
        extras: ExtraValues | None,
        device: torch.device,
    ) -> None:
        env, cast = needs.env, needs.cast
        self.env = env
        self._device = device
        self.lead = env.batch_size
        self.observation = {leaf.key: self._batched(current[leaf.key]) for leaf in env.observation}
        self._casts: dict[Key, Callable[[], None]] = {}
        if cast is not None:
            for leaf, dtype, scale in cast.targets(env.observation):
                self._cast(leaf.key, dtype, scale)
        self.tensors = dict(self.observation)
        self.collector_entries = CollectorEntries(env, needs.counts_steps)
        self.extras: ExtraValues = {} if extras is None else extras
        self._random_states: list[tuple[StateForm, PolicyState]] = []

    def _cast(self, key: Key, dtype: torch.dtype, scale: float | None) -> None:
        """Make the policy read an observation in the dtype, multiplied by the scale."""
        source = self.observation[key]
        target = torch.empty_like(source, dtype=dtype)

        def cast() -> None:
            target.copy_(source)
            if scale is not None:
                target.mul_(scale)

        cast()
        self.observation[key], self._casts[key] = target, cast

    def casting(self, act: Act, read: Container[Key]) -> Act:
        """Return `act` with casts of the observations that the policy reads before each call."""
        casts = [cast for key, cast in self._casts.items() if key in read]
        if not casts:
            return act

        def cast_and_act() -> tuple[torch.Tensor, ...]:
            for cast in casts:
                cast()
            return act()

        return cast_and_act

    def add_collector_entry(self, key: Key) -> None:
        """Add an entry that the collector writes to the tensors that the policy may read."""
        self.tensors[key] = self._batched(self.collector_entries.give(key))

    def _batched(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a view of P rows with the environment's batch dimensions."""
        return rows.view(*self.lead, *rows.shape[1:]) if len(self.lead) > 1 else rows

    def rows_of(self, act: Act) -> Act:
        """Return `act` with its outputs as P rows, the shape in which they are recorded."""
        last = len(self.lead) - 1
        if last < 1:
            return act
        return lambda: tuple([out.flatten(0, last) for out in act()])

    def set_states(self, forms: Mapping[Key, StateForm]) -> None:
        """Create states of these forms; they replace earlier states."""
        self.states = tuple(form.state(key, self.env, self._device) for key, form in forms.items())
        self.tensors.update({state.leaf.key: self._batched(state.current) for state in self.states})
        pairs = zip(forms.values(), self.states, strict=True)
        self._random_states = [(form, state) for form, state in pairs if form.draw is not None]

    @property
    def has_random_states(self) -> bool:
        """Whether the first value of some state is drawn anew for each trajectory."""
        return bool(self._random_states)

    def draw_initial_states(self) -> None:
        """Draw the first values of states for the next trajectories."""
        for form, state in self._random_states:
            state.initial.copy_(form.drawn(self.env))


class TensorDictCall:
    """Build the TensorDict of each call of a policy, and read the one that it returns."""

    def __init__(self, inputs: PolicyInputs, transfer: DeviceTransfer) -> None:
        env = inputs.env
        self.extra_values: ExtraValues = {}  # outputs of the last step, one value per environment
        self._inputs = inputs
        self._transfer = transfer
        self.kept: dict[Key, Any] = {}  # root entries of the last call, for the next call
        nodes = (extra for extra in env.action_extras if extra.kind is Kind.NODE)
        self._env_keys = tuple(extra.key for extra in (*env.extras, *nodes))

    def tensordict(self, tensors: Mapping[Key, torch.Tensor] | None = None) -> TensorDictBase:
        """Return copies of the policy's inputs, with its last outputs; the policy may keep them.

        `tensors` replace the inputs, for example by copies on the policy's device.
        """
        env, batch = self._inputs.env, self._inputs.lead
        copy, device = self._transfer.copy_to_device, self._transfer.tensordict_device
        tensors = self._inputs.tensors if tensors is None else tensors
        entries: dict[Any, Any] = {key: copy(tensor) for key, tensor in tensors.items()}
        if not self._inputs.extras:
            entries.update(self.kept)
        td: TensorDictBase = TensorDict(entries, batch_size=batch, device=device)
        for key, node in env.nodes.items():
            if node.shape and td.get(key, None) is not None:
                td.get(key).batch_size = torch.Size([*batch, *node.shape])
        if self._inputs.extras:
            td = with_current(td, self._inputs.extras, env.extras, batch)
            td = td.update(self.kept)
        return td

    def new_keys(self, out: TensorDictBase) -> list[Key]:
        """Return the keys of entries that are not inputs of the policy."""
        keys: Iterable[Any] = out.keys(include_nested=True, leaves_only=True, is_leaf=_is_leaf)
        new = (key for key in map(as_key, keys) if key not in self._inputs.tensors)
        return [
            key for key in new if not any(key[: len(extra)] == extra for extra in self._env_keys)
        ]

    def act(
        self,
        policy: Callable[..., Any],
        wanted: Sequence[Key],
        expected: frozenset[Key],
        extras: tuple[Extra, ...],
        finish: Finishers,
    ) -> Act:
        """Return the function that calls the policy once per step.

        Args:
            expected: Keys that the policy must return. It may also return states and private keys,
                but no other keys.
        """
        tensors: Mapping[Key, torch.Tensor] = self._inputs.tensors
        crosses = self._transfer.is_needed(tensors.values())
        tensors = self._transfer.mirrors(tensors) if crosses else tensors
        batch = self._inputs.lead
        ragged = {extra.key for extra in extras if extra.kind is Kind.RAGGED}

        def act_with_tensordict() -> tuple[torch.Tensor, ...]:
            out = returned(policy, self.tensordict(tensors))
            new = self.new_keys(out)
            found = {key: out.get(key) for key in new if key not in ragged}
            self.kept = {key: value for key, value in found.items() if key[0] != "next"}
            keys = {key for key in new if is_delivered(key) or key in expected}
            if keys != expected:
                raise PolicyOutputError(
                    f"policy: expected the output key(s) {show_all(wanted)}, as in its first call; "
                    f"missing: {show_all(expected - keys)}, unexpected: {show_all(keys - expected)}"
                )
            self.extra_values = read_values(out, extras, batch)
            values = [found[key] if key in found else out.get(key) for key in wanted]
            for place, function in finish:
                values[place] = function(values[place])
            return tuple(values)

        return self._transfer.wrap(act_with_tensordict) if crosses else act_with_tensordict


def returned(policy: Callable[..., Any], td: TensorDictBase) -> TensorDictBase:
    """Call the policy and return its TensorDict; PolicyOutputError if it returns another type."""
    out = policy(td)
    if not isinstance(out, TensorDictBase):
        raise PolicyOutputError(
            f"policy: expected it to return the TensorDict, got a {type(out).__name__}"
        )
    return out


def _is_leaf(kind: type) -> bool:
    """Return whether a class is a leaf: tensors, and other data, which may have to be refused."""
    return issubclass(kind, torch.Tensor) or is_object(kind)


def make_current(spec: EnvSpec) -> dict[Key, torch.Tensor]:
    """Create memory for the current observation, [*obs] for one environment, [P, *obs] for a batch.

    Entries of `spec.device_keys` are on the environment's device, others on the CPU.
    """
    return {
        leaf.key: torch.zeros(
            (*spec.rows, *leaf.shape),
            dtype=torch_dtype(leaf.dtype),
            device=spec.device if leaf.key in spec.device_keys else CPU,
        )
        for leaf in spec.observation
    }


def write_current(current: dict[Key, torch.Tensor], observation: Arrays) -> None:
    """Write an observation into that memory."""
    arrays = observation if isinstance(observation, tuple) else (observation,)
    # An observation may also have step_only leaves, at its end.
    for tensor, array in zip(current.values(), arrays, strict=False):
        if tensor.device.type != "cpu":
            tensor.copy_(array)
        else:
            copy(tensor, array if isinstance(array, torch.Tensor) else np.asarray(array))

"""A policy called with a TensorDict: what it is given, and what is new in what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from pycollect.data.extras import Extra, ExtraValues, Kind, read_values, with_current
from pycollect.data.layout import Key, is_delivered
from pycollect.policy.device_transfer import Crossing
from pycollect.policy.inputs import PolicyInputs
from pycollect.policy.program.compile import Act, Finishers
from pycollect.policy.program.steps import PolicyOutputError, as_key, show_all


class TensorDictCall:
    """Makes the TensorDicts that a policy is called with, and reads those that come back.

    Attributes:
        said: the extra outputs of the last step, a value per env.
    """

    def __init__(self, inputs: PolicyInputs, crossing: Crossing) -> None:
        env = inputs.env
        self.said: ExtraValues = {}
        self._inputs = inputs
        self._crossing = crossing
        self._left: dict[Key, Any] = {}  # at the root, by the policy's last call
        nodes = (extra for extra in env.action_extras if extra.kind is Kind.NODE)
        self._taken = tuple(extra.key for extra in (*env.extras, *nodes))

    def forget(self) -> None:
        """Drop what the policy wrote for its next call."""
        self._left = {}

    def tensordict(self, given: Mapping[Key, torch.Tensor] | None = None) -> TensorDictBase:
        """The policy's inputs, copied, and what it wrote last: it may keep what it is given.

        Args:
            given: the same tensors where they have come to the policy's device already.
        """
        env, batch = self._inputs.env, self._inputs.lead
        over, device = self._crossing.over, self._crossing.shown
        given = self._inputs.tensors if given is None else given
        entries: dict[Any, Any] = {key: over(tensor) for key, tensor in given.items()}
        if not self._inputs.extras:
            entries.update(self._left)
        td: TensorDictBase = TensorDict(entries, batch_size=batch, device=device)
        for key, node in env.nodes.items():
            if node.shape and td.get(key, None) is not None:
                td.get(key).batch_size = torch.Size([*batch, *node.shape])
        if self._inputs.extras:
            td = with_current(td, self._inputs.extras, env.extras, batch).update(self._left)
        return td

    def new_keys(self, out: TensorDictBase) -> list[Key]:
        """The entries that the policy was not given."""
        keys: Iterable[Any] = out.keys(include_nested=True, leaves_only=True, is_leaf=_is_leaf)
        new = (key for key in map(as_key, keys) if key not in self._inputs.tensors)
        return [key for key in new if not any(key[: len(own)] == own for own in self._taken)]

    def act(
        self,
        policy: Callable[..., Any],
        wanted: Sequence[Key],
        expected: frozenset[Key],
        extras: tuple[Extra, ...],
        finish: Finishers,
    ) -> Act:
        """The function that calls the policy once per step.

        Args:
            wanted: the keys whose tensors it returns, after `finish` was applied to single ones.
            expected: the keys that may come and must, beside states and those that begin with "_".
            extras: what is kept in `said`.
        """
        given: Mapping[Key, torch.Tensor] = self._inputs.tensors
        crosses = self._crossing.is_needed(given.values())
        given = self._crossing.mirrors(given) if crosses else given
        batch = self._inputs.lead
        ragged = {extra.key for extra in extras if extra.kind is Kind.RAGGED}

        def act_with_tensordict() -> tuple[torch.Tensor, ...]:
            out = returned(policy, self.tensordict(given))
            new = self.new_keys(out)
            found = {key: out.get(key) for key in new if key not in ragged}
            self._left = {key: value for key, value in found.items() if key[0] != "next"}
            came = {key for key in new if is_delivered(key) or key in expected}
            if came != expected:
                raise PolicyOutputError(
                    f"policy: expected the output key(s) {show_all(wanted)}, as in its first call; "
                    f"missing: {show_all(expected - came)}, unexpected: {show_all(came - expected)}"
                )
            self.said = read_values(out, extras, batch)
            values = [found[key] if key in found else out.get(key) for key in wanted]
            for place, function in finish:
                values[place] = function(values[place])
            return tuple(values)

        return self._crossing.around(act_with_tensordict) if crosses else act_with_tensordict


def returned(policy: Callable[..., Any], td: TensorDictBase) -> TensorDictBase:
    """Call the policy and return its TensorDict; PolicyOutputError if it returns another type."""
    out = policy(td)
    if not isinstance(out, TensorDictBase):
        raise PolicyOutputError(
            f"policy: expected it to return the TensorDict, got a {type(out).__name__}"
        )
    return out


def _is_leaf(kind: type) -> bool:
    """Tensors, and what is no tensor at all, which has to be seen to be refused."""
    return issubclass(kind, torch.Tensor) or bool(getattr(kind, "_is_non_tensor", False))

"""What a policy reads: the current observation, its states, entries that the collector keeps."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch

from pycollect.data.cast import ObservationCast
from pycollect.data.extras import ExtraValues
from pycollect.data.layout import Key
from pycollect.envs.base import EnvBatch
from pycollect.policy.program.compile import Act
from pycollect.policy.states import Form, OwnEntries, PolicyState


class PolicyInputs:
    """The memory that a policy reads at each step; whoever collects writes into it between steps.

    Args:
        env: whose observation it is.
        current: at least that observation, by key.
        extras: the current observation's, kept up to date like `current`.
        counts_steps: see `OwnEntries`.
        home: where states lie.
        cast: of observations, which the policy reads as they are delivered; None: as they are.

    Attributes:
        lead: the batch dimensions of every tensor, the environment's own: (), (P,) or [a, b] of
            P = a * b, say.
        observation: the environment's leaves, by key; those that are cast are kept by `casting`.
        tensors: all that the policy may read: the observation, states and own entries given to it.
        own: what the collector itself can give.
        states: what the policy passes on to its next call.
    """

    states: tuple[PolicyState, ...] = ()

    def __init__(
        self,
        env: EnvBatch,
        current: Mapping[Key, torch.Tensor],
        extras: ExtraValues | None,
        counts_steps: bool,
        home: torch.device,
        cast: ObservationCast | None = None,
    ) -> None:
        self.env = env
        self._home = home
        self.lead = env.batch_size
        self.observation = {leaf.key: self._seen(current[leaf.key]) for leaf in env.observation}
        self._casts: dict[Key, Callable[[], None]] = {}
        if cast is not None:
            for leaf, dtype, scale in cast.targets(env.observation):
                self._cast(leaf.key, dtype, scale)
        self.tensors = dict(self.observation)
        self.own = OwnEntries(env, counts_steps)
        self.extras: ExtraValues = {} if extras is None else extras
        self._redrawn: list[tuple[Form, PolicyState]] = []

    def _cast(self, key: Key, dtype: torch.dtype, scale: float | None) -> None:
        """From now on the policy reads the observation so."""
        shown = self.observation[key]
        seen = torch.empty_like(shown, dtype=dtype)

        def cast() -> None:
            seen.copy_(shown)
            if scale is not None:
                seen.mul_(scale)

        cast()
        self.observation[key], self._casts[key] = seen, cast

    def casting(self, act: Act, read: Container[Key]) -> Act:
        """`act`, after what it reads of the observation was cast."""
        casts = [cast for key, cast in self._casts.items() if key in read]
        if not casts:
            return act

        def cast_and_act() -> tuple[torch.Tensor, ...]:
            for cast in casts:
                cast()
            return act()

        return cast_and_act

    def give_own(self, key: Key) -> None:
        """Give the policy that entry of the collector's own."""
        self.tensors[key] = self._seen(self.own.give(key))

    def _seen(self, rows: torch.Tensor) -> torch.Tensor:
        """Memory of P rows as the policy sees it, in the environment's batch dimensions."""
        return rows.view(*self.lead, *rows.shape[1:]) if len(self.lead) > 1 else rows

    def rows_of(self, act: Act) -> Act:
        """`act`, with its outputs as P rows, which is how they are recorded."""
        last = len(self.lead) - 1
        if last < 1:
            return act
        return lambda: tuple([out.flatten(0, last) for out in act()])

    def give_states(self, forms: Mapping[Key, Form]) -> None:
        """Give the policy states of these forms, in place of those it may have had."""
        self.states = tuple(form.state(key, self.env, self._home) for key, form in forms.items())
        self.tensors.update({state.leaf.key: self._seen(state.current) for state in self.states})
        pairs = zip(forms.values(), self.states, strict=True)
        self._redrawn = [(form, state) for form, state in pairs if form.draw is not None]

    @property
    def are_redrawn(self) -> bool:
        """Whether some state begins otherwise in each trajectory."""
        return bool(self._redrawn)

    def redraw(self) -> None:
        """Draw anew how the states of the next trajectories begin."""
        for form, state in self._redrawn:
            state.initial.copy_(form.drawn(self.env))

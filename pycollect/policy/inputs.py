"""PolicyInputs: the observation, states and other entries that a policy reads."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch

from pycollect.data.cast import ObservationCast
from pycollect.data.extras import ExtraValues
from pycollect.data.layout import Key
from pycollect.envs.base import EnvSpec
from pycollect.policy.program.compile import Act
from pycollect.policy.states import CollectorEntries, PolicyState, StateForm


class PolicyInputs:
    """The memory that a policy reads at each step. The recorder updates it between steps.

    Args:
        env: Environment whose observation the policy reads.
        current: Current observation by key. It may contain more entries.
        extras: Extras of the current observation, updated like `current`.
        counts_steps: Whether the recorder counts steps, see `CollectorEntries`.
        device: Device of the states.
        cast: Casts of observations, which the policy reads as batches contain them. Defaults to
            ``None``: no casts.

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
        env: EnvSpec,
        current: Mapping[Key, torch.Tensor],
        extras: ExtraValues | None,
        counts_steps: bool,
        device: torch.device,
        cast: ObservationCast | None = None,
    ) -> None:
        self.env = env
        self._device = device
        self.lead = env.batch_size
        self.observation = {leaf.key: self._batched(current[leaf.key]) for leaf in env.observation}
        self._casts: dict[Key, Callable[[], None]] = {}
        if cast is not None:
            for leaf, dtype, scale in cast.targets(env.observation):
                self._cast(leaf.key, dtype, scale)
        self.tensors = dict(self.observation)
        self.collector_entries = CollectorEntries(env, counts_steps)
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

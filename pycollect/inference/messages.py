"""What a worker and the server of its policy say to each other, beside the rows of a board.

A question is empty, "what lies in my row", or a `Joining`. The answer to the first is empty, or
what was raised; to a `Joining` it is a `Joined`, or what was raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pycollect._core import Leaf
from pycollect.batch.cast import ObservationCast
from pycollect.batch.layout import Key
from pycollect.batch.slab_rows import MemoryAddress
from pycollect.inference.board import BoardForm
from pycollect.inference.env_form import EnvForm
from pycollect.policy import Calling


@dataclass(frozen=True)
class PolicyNeeds:
    """What a worker says of how the policy is to be called; workers with the same share calls.

    Attributes:
        env: its environments.
        counts_steps: they are counted, so that a policy may read them.
        cast: of observations, for the policy.
        state_forms: `policy_state`, by key.
    """

    env: EnvForm
    counts_steps: bool
    calling: Calling
    cast: ObservationCast | None
    state_forms: tuple[tuple[Any, Any], ...]

    def are(self, others: PolicyNeeds) -> bool:
        """Whether they are the same as those."""
        if len(self.state_forms) != len(others.state_forms):
            return False
        pairs = zip(self.state_forms, others.state_forms, strict=True)
        return replace(self, state_forms=()) == replace(others, state_forms=()) and all(
            ours[0] == theirs[0] and _same(ours[1], theirs[1]) for ours, theirs in pairs
        )


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two shapes, or two first values, are the same."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    return bool(type(ours) is type(theirs) and ours == theirs)


@dataclass(frozen=True)
class Joining:
    """A worker is built but for its policy.

    Attributes:
        first: its current observation, ``[P, *frame]`` by key.
    """

    needs: PolicyNeeds
    first: Mapping[Key, torch.Tensor]


@dataclass(frozen=True)
class Joined:
    """Where it finds its row, and what the policy turned out to be.

    Attributes:
        memory, form, row: of the board.
        inputs, outputs, through_env: as a PolicyRunner's.
        states: leaf and first value of each that is recorded.
        reads: which of the collector's own entries lie on the board, too.
        numbered: states lie beside the policy, and answers have numbers, see `ANSWER`.
    """

    memory: MemoryAddress
    form: BoardForm
    row: int
    inputs: tuple[Key, ...]
    outputs: tuple[Leaf, ...]
    states: tuple[tuple[Leaf, torch.Tensor], ...]
    through_env: tuple[Leaf, ...]
    reads: tuple[Key, ...]
    numbered: bool

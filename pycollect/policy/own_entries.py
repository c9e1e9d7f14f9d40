"""What the collector itself shows a policy beside the observation."""

from __future__ import annotations

import torch

from pycollect.batch.layout import Key
from pycollect.envs.base import EnvBatch

IS_INIT: Key = ("is_init",)
STEP_COUNT: Key = ("step_count",)
_FLAGS: tuple[Key, ...] = (("done",), ("terminated",), ("truncated",))


class OwnEntries:
    """Entries of the state acted on that the collector keeps, for policies that read them.

    Each is made when it is given, so that it costs a policy that does not read it nothing.

    Args:
        env: one without flags of its own has those of the collector, which are always False: what
            ended is reset before it is acted on.
        counts_steps: the recorder counts the steps of each trajectory.

    Attributes:
        given: [1] or [P, 1] each, by key: `is_init` and flags bool, `step_count` int64. The
            Recorder keeps `is_init` and `step_count` up to date.
    """

    def __init__(self, env: EnvBatch, counts_steps: bool) -> None:
        self._shape = (env.num_envs, 1) if env.batched else (1,)
        self._first: dict[Key, bool | int] = {IS_INIT: True}
        if not env.own_flags:
            self._first.update(dict.fromkeys(_FLAGS, False))
        if counts_steps:
            self._first[STEP_COUNT] = 0
        self.given: dict[Key, torch.Tensor] = {}

    def offers(self, key: Key) -> bool:
        """Whether it is one of these entries."""
        return key in self._first

    def missing(self, error: KeyError) -> Key | None:
        """Which entry, not given yet, a policy missed that raised this; None for any other key."""
        left = (key for key in self._first if key not in self.given)
        return next((key for key in left if key[0] in str(error)), None)

    def give(self, key: Key) -> torch.Tensor:
        """The memory of that entry, as it is at a trajectory's first step."""
        self.given[key] = torch.tensor(self._first[key], device="cpu").repeat(self._shape)
        return self.given[key]

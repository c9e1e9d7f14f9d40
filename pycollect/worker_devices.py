"""Where the parts of a worker lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Devices:
    """Where the parts of one worker are to lie; None where nobody told.

    Attributes:
        default: `device`, for what the others do not say.
        storing: batches.
        env: environments.
        policy: the policy.
    """

    default: torch.device | None = None
    storing: torch.device | None = None
    env: torch.device | None = None
    policy: torch.device | None = None

    @property
    def told(self) -> torch.device | None:
        """What ``td.device`` of a batch says."""
        agreed = self.env if self.env == self.policy else None
        return self.storing or self.default or agreed

    @property
    def of_batches(self) -> torch.device | None:
        """Where batches are to lie; None: where the environment does."""
        return self.storing or self.default or self.env

    @property
    def of_env(self) -> torch.device | None:
        """Where the environment is to lie that says nothing itself."""
        return self.env or self.default

    @property
    def of_policy(self) -> torch.device | None:
        """Where the policy is to lie."""
        return self.policy or self.default

    @property
    def of_worker(self) -> frozenset[str]:
        """The types of the devices that a worker itself works with."""
        return frozenset(own.type for own in (self.of_env, self.of_policy) if own is not None)

"""Settings that both algorithms share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycollect.scheme.protocols import AlgorithmFactory


@dataclass
class AlgorithmBase:
    """Base of the algorithms; see :class:`pycollect.scheme.protocols.Algorithm`."""

    start_steps: int = 0
    update_every: int | None = None
    num_epochs: int = 1
    num_mini_batch: int = 1
    test_every: int = 1
    num_test_episodes: int = 0
    actor: Any = None

    @classmethod
    def create_factory(cls, **settings: Any) -> AlgorithmFactory:
        """Return a function that makes an algorithm; `settings` are its other attributes."""
        cls(**settings)  # raises for a wrong name now
        return lambda device, actor, envs: cls(actor=actor, **settings)

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set an attribute of the algorithm."""
        setattr(self, parameter_name, new_parameter_value)

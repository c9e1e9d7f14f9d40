"""Small components over Gymnasium for a CWorkerSet, on-policy and off-policy.

Each has ``create_factory``, like PyTorchRL's components. They cover collection; the learning is up
to you, as in ``examples/scheme.py``.
"""

from pycollect.scheme.gym.algorithms import (
    ActorCritic,
    OffPolicy,
    OnPolicy,
    QNetwork,
    RolloutStorage,
    TransitionStorage,
)
from pycollect.scheme.gym.envs import GymEnvs

__all__ = [
    "ActorCritic",
    "GymEnvs",
    "OffPolicy",
    "OnPolicy",
    "QNetwork",
    "RolloutStorage",
    "TransitionStorage",
]

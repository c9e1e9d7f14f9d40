"""Small components over Gymnasium for a CWorkerSet, on-policy and off-policy.

Each has ``create_factory``, like PyTorchRL's components. They cover collection; the learning is up
to you, as in ``examples/scheme.py``.
"""

from pycollect.scheme.gym.actors import ActorCritic, QNetwork
from pycollect.scheme.gym.envs import GymEnvs
from pycollect.scheme.gym.off_policy import OffPolicy, TransitionStorage
from pycollect.scheme.gym.on_policy import OnPolicy, RolloutStorage

__all__ = [
    "ActorCritic",
    "GymEnvs",
    "OffPolicy",
    "OnPolicy",
    "QNetwork",
    "RolloutStorage",
    "TransitionStorage",
]

"""Small components over Gymnasium for a CWorkerSet: one kind on-policy, one off-policy.

Each has ``create_factory``, as PyTorchRL's have. They are what collecting needs; how data are
learnt from is the caller's, see ``examples/scheme.py``.
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

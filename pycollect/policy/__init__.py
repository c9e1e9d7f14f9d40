"""Policies: any accepted policy as a function from the current observation to what is recorded.

Floor below: `envs`, whose observations it reads and whose actions it gives.
Way of the data: policy -> signature (what it reads and writes) -> program, or a TensorDict per step
-> probe (its first call) -> runner: `act()` at each step.
"""

from pycollect.batch.weights import device_of, named_weights, placed
from pycollect.policy.calling import AS_IT_IS, Calling
from pycollect.policy.elsewhere import PolicyElsewhere, RunnerElsewhere
from pycollect.policy.random_runner import RandomRunner
from pycollect.policy.runner import PolicyRunner, build, make_policy_runner
from pycollect.policy.specs import told_of_actions
from pycollect.policy.states import PolicyState, check_policy_state

__all__ = [
    "AS_IT_IS",
    "Calling",
    "PolicyElsewhere",
    "PolicyRunner",
    "PolicyState",
    "RandomRunner",
    "RunnerElsewhere",
    "build",
    "check_policy_state",
    "device_of",
    "make_policy_runner",
    "named_weights",
    "placed",
    "told_of_actions",
]

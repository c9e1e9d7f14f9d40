"""Turn a policy into calls over tensors, without a TensorDict per step.

Layers below: `envs`, `data`.
Data flow: module or callable -> steps -> compile (a plan, or the module itself) -> `act()`.
"""

"""Turn any accepted policy into one call per step. This code runs in the worker.

Layer below: `envs`, whose observations a policy reads and whose actions it returns.
Data flow: policy -> signature (its keys) -> program, or a TensorDict per step -> probe (its first
call) -> runner: `act()` at each step.
"""

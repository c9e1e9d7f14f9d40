"""A policy taken apart into calls over tensors, so that no TensorDict is built per step.

Floor below: `envs`, `batch`.
Way of the data: module or callable -> steps (a program) -> compile (bit for bit the same, or not
taken) -> the function that is called at each step.
"""

"""Environments: anything that `create_env_fn` accepts, as P environments that step together.

This code runs in the worker.

Layer below: `data`.
Data flow: entry -> make (which kind of environment it is) -> EnvBatch: `reset` and `step` over
arrays or tensors -> the worker.
"""

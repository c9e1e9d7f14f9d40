"""One worker: environments, policy and recorder. It collects one rollout per request.

This code runs where environments step: in the worker's process, or in the driver with
`SyncDataCollector`.

Layers below: `policy`, `envs`, `data`.
Data flow: request -> EnvGroup (environments, policy, recorder) -> step loop -> rows of a slab and a
report.
"""

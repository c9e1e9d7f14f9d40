"""TorchRL's names and calling forms, over the native collector.

`torchrl` has the base of all public collectors; `weights`, `profiling`, `one_worker` and
`many_workers` have the groups of names that it is composed of. `WorkerView` runs in workers.

Only `api` imports this package.
"""

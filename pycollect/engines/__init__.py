"""Engines: workers in other processes. What crosses to them, what runs there, how one waits.

The driver has an engine and a handle for each worker (`protocol`); the worker's process has a
RemoteWorker, which hosts what collects there (`rollout_worker`). Both ends of what crosses are
`messages`. An engine of another kind is one more folder here.

Floor below: `worker`. Not known here: batches of several workers, and who schedules them.
Way of the data: request -> handle -> process or actor -> RemoteWorker -> rows of a shared slab, or
bytes -> handle -> rollout.
"""

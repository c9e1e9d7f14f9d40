"""The stream of batches that a user iterates: counting, state and delivery.

`collector` gets batches from a `source`, such as `in_process`; both update a `flow`. `ledger`
accounts for every frame, `state` saves and restores the stream, and `delivery` and the `buffer_`
files pass batches to the user or a replay buffer.

Depends on `worker`, and on `trajectories` for batches of whole trajectories. It does not know
workers in other processes.
Data flow: batch -> (queue of trajectories) -> delivery -> user, or replay buffer.
"""

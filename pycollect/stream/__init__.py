"""The stream of batches that a user iterates: its counting, its state, its delivery.

`collector` has a `source` of batches, of which `in_process` is one; both write into a `flow`.

`ledger` says what became of every frame, `state` where the stream stands, `delivery` and the
`buffer_` files how a batch gets to the user or into a replay buffer, `weight_` files by which of
TorchRL's ways new weights come.

Floor below: `worker`, and `trajectories` for batches of whole ones. Workers elsewhere are not known
here.
Way of the data: batch -> (queue of trajectories) -> delivery -> user, or replay buffer.
"""

"""Trajectories: splitting batches, batches of complete trajectories, n-step returns.

The core makes a plan in one pass over flags and ids; frames are then gathered by it.

Depends on `batch`.
Data flow: batch -> split, or queue (rollouts in, complete trajectories out) -> padded rows, a flat
batch or nested tensors; batch -> multistep -> n-step transitions.
"""

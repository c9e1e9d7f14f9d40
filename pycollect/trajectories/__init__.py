"""Trajectories: batches cut into them, collected until they are complete, and n-step returns.

A plan is made in one pass over flags and ids, by the core; frames are then gathered by it.

Floor below: `batch`.
Way of the data: batch -> split, or queue (rollouts in, complete trajectories out) -> padded rows,
a flat batch or nested tensors; batch -> multistep -> n-step transitions.
"""

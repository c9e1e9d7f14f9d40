"""Central inference: one call of the policy for the environments of many workers.

Floors below: `engines`, whose workers ask, and `policy`, which is called.
Way of the data: a worker's current observation lies in its row of a board in shared memory ->
client: asks through its slot -> server: one call for all rows whose workers wait -> the outputs, in
their rows of the same board.
"""

"""Central inference: one policy is called for the environments of many workers.

The server runs in the driver or in a process of its own, the client in each worker.

Layers below: `transport`, whose workers send requests, and `policy`, which is called.

Data flow: observations of a worker -> shared memory -> one call for all waiting workers -> outputs
back through shared memory.
"""

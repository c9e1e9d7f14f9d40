"""The stream of batches: who collects, what arrived, what was lost, what the user gets.

This code runs in the program that calls the collector. A `Collector` iterates over batches of a
`Source`: `InProcess` has one worker in this process, and `Scheduler` has workers elsewhere. Both
write into a `Flow`, the accounts that collector and source share.

Layers below: `inference`, `transport`, `worker`.
Data flow: request to each worker -> rollouts -> assembly (rows of one slab) -> batch -> delivery.
Weights and hooks go the other way.
"""

from __future__ import annotations

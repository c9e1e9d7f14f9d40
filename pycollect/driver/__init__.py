"""Produce the stream of batches: schedule workers, account for frames, and deliver to the caller.

This code runs in the program that calls the collector. A `Collector` iterates over the batches of a
`Source`: `InProcess` has one worker in this process, and `Scheduler` has workers in other
processes. Both record counts and ids in a `Flow`, which the collector and its source share.

Layers below: `inference`, `transport`, `worker`.

Data flow: request to each worker -> rollouts -> assembly (rows of one slab) -> batch -> delivery.
Weights and hooks go the other way.
"""

from __future__ import annotations

"""Batches, weights and trajectories, on any device. This code runs in every process.

A slab is one block of memory that the core lays out. This folder describes its leaves, makes
tensors and TensorDicts of it, moves batches between devices, and cuts them into trajectories. It
knows neither environments nor policies.

Layer below: the core, and the modules of the package's root.
Data flow: layout -> frame (its leaves) -> slabs (tensors of a slab) -> TensorDict -> cast, upload
-> split_trajectories, MultiStep or a queue of trajectories.
"""

from __future__ import annotations

"""Batches, weights and trajectories, on any device. This code runs in every process.

A slab is one block of memory with a layout from the core. This folder describes the leaves of a
slab, makes tensors and TensorDicts of them, moves batches between devices, and splits batches into
trajectories. It does not depend on environments or policies.

Layer below: the core, and the modules of the package's root.
Data flow: layout -> frame (leaves) -> slabs (tensors of a slab) -> TensorDict -> cast, upload
-> split_trajectories, MultiStep or a trajectory queue.
"""

from __future__ import annotations

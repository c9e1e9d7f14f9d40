"""Batches: slabs of frames, and the TensorDicts that are seen of them.

A slab is one block of memory that the core lays out; this folder says which leaves it has, and
makes views of it. It knows no environment, no policy and no worker.

Floor below: the core, and what the whole package stands on (`devices`, `checks`, `errors`).
Way of the data: layout -> frame (its leaves) -> slab_views (tensors of a slab) -> TensorDict
-> cast, upload (dtype and device of what is delivered).
"""

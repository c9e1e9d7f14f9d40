"""The collectors: where environments and policies run, and how their rollouts become batches."""

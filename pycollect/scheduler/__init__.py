"""The scheduler: which worker elsewhere collects what, and what becomes of it.

It asks workers, awaits them, replaces those that die, and assembles their rollouts into batches,
whichever engine runs them.

Floors below: `engines` (asked), `stream` (given batches).
Way of the data: request to each worker of a group -> rollouts -> assembly (rows of one slab) ->
batch; weights and hooks go the other way.
"""

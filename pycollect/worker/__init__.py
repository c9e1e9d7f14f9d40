"""A worker: environments, policy and recorder; one rollout when asked. In whatever process it is.

It neither knows who asks nor where the rows that it writes belong to.

Floors below: `policy`, `envs`, `batch`.
Way of the data: action = recorder.take(act()); recorder.record(env_step(action)) -> rows of a slab;
report (what is said of the rollout beside its frames).
"""

"""Start, reach, monitor and end workers in other processes. Holds both ends of each connection.

One folder per kind of worker: `processes` (this machine), `ray` (actors) and `distributed` (ranks
of torch.distributed). `engine` declares what starts them, and `process` what was started. `handle`
and `host` are the two ends of a connection, which exchange `messages` through a `channel`.

Layer below: `worker`, which runs at the other end.
"""

from __future__ import annotations

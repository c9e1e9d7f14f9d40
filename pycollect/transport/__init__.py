"""Start, reach, monitor and end workers in other processes. Holds both ends of each connection.

One folder per kind of worker: `processes` (this machine), `ray` (actors) and `distributed` (ranks
of torch.distributed). `process` declares the interface of an engine; all kinds share the
`messages`.

Layer below: `worker`, which runs at the other end.
"""

from __future__ import annotations

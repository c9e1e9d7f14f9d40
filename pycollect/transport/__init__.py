"""Workers in other processes: started, reached, watched, ended. Both ends of each connection.

One folder per kind: `processes` on this machine, `ray` actors, and ranks of torch.distributed
(`distributed`). `process` declares what an engine offers; `messages` are the same for all kinds.

Layer below: `worker`, which runs at the other end.
"""

from __future__ import annotations

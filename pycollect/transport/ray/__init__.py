"""Ray actors. All that is asked of Ray is asked here.

Driver's side: `engine`, `session`, `driver`, `actor`, `starting`, `monitor`, `servers`,
`inference`. Actor's side: `serve`.

Floor below: the files of `engines`, and `engines.processes`: an actor on the driver's node is asked
through a mailbox, as a process is.
Way of the data: request -> mailbox, or a call of Ray -> RemoteWorker -> the driver's own slab, or
the object store.
"""

from __future__ import annotations

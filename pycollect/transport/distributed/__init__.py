"""Workers that are ranks of torch.distributed, whoever starts their processes.

Driver's side: `engine`, `rendezvous`, `monitor`, `caller`, and launchers: `children`, `jobs`,
`delayed`, the last two by `executors`.
Rank's side: `rank`, `serve`. Both: `address`, where they meet; `interrupts`, heard or not; `link`,
messages between the two, which are carried in `groups` of two ranks each (`group_link`) or by an
`rpc_agent` (`rpc_link`, `rpc_rank`).

Floor below: the files of `engines`, and `engines.processes`: a rank on the driver's node is asked
through a mailbox, as a process is.
Way of the data: request -> mailbox, or a message -> RemoteWorker -> the driver's own slab, or a
message into memory of its own.
"""

from __future__ import annotations

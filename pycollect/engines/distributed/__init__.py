"""Workers that are ranks of torch.distributed, whoever starts their processes.

Driver's side: `engine`, `rendezvous`, `monitor`, `caller`, and launchers: `children`, `jobs`,
`delayed`.
Rank's side: `rank`, `serve`. Both: `address`, where they meet; `groups`, of two ranks each; `link`,
messages.

Floor below: the files of `engines`, and `engines.processes`: a rank on the driver's node is asked
through a mailbox, as a process is.
Way of the data: request -> mailbox, or a message -> RemoteWorker -> the driver's own slab, or a
message into memory of its own.
"""

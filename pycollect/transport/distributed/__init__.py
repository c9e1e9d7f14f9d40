"""Workers in ranks of torch.distributed, or in processes of its RPC.

Driver's side: `engine`, `rendezvous`, and the launchers in `launchers` and `delayed`. Rank's side:
`rank`. Both: `meeting`, by which the two find each other, and the links that carry messages:
`links` (a process group of two), `rpc` and `rpc_link`.

Layers below: the files of `transport`, and `transport.processes`, because a rank on the driver's
node uses a mailbox.
"""

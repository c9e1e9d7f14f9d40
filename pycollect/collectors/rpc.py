"""The collector whose workers are asked by torch.distributed.rpc."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pycollect.arguments import check_flag
from pycollect.collectors.arguments import distributed as check
from pycollect.collectors.arguments import rpc as rpc_check
from pycollect.collectors.arguments.given import Given, takes
from pycollect.collectors.distributed import DistributedDataCollector, rank_arguments
from pycollect.collectors.launched import LaunchedCollector
from pycollect.docstrings import completed_by


@completed_by(DistributedDataCollector, raises=False)
class RPCDataCollector(DistributedDataCollector):
    """Collects in ranks that torch.distributed.rpc calls, started by a launcher, here or elsewhere.

    Ranks on this node that can open this process's memory write into the batch, as those of
    :class:`DistributedDataCollector` do; RPC is how others are asked and answer. It makes no group
    of all ranks: each is called by this process alone, so that one that dies is replaced.

    torch has one agent of RPC in each process. If the program has called `init_rpc` before ranks
    are asked by RPC, its agent calls them, too; else this collector makes one, which all of this
    process share, and which ends with the last: until then `init_rpc` raises.

    Args:
        backend: taken as TorchRL's, and checked; weights are carried by RPC, too.
        visible_devices: for each rank, where TorchRL's tensors arrive on this machine. Checked;
            here rollouts are carried in host memory, and batches come on `storing_device`, which a
            warning says where a GPU is named.
        tensorpipe_options: of `TensorPipeRpcBackendOptions`: "num_worker_threads", 16 by default,
            "rpc_timeout", in seconds, in which a message has to arrive, 0 by default, which is no
            limit: `worker_timeout` is one; "_transports", ["uv"] by default, and "_channels".
        tcp_address: also where agents of ranks listen, at any free port. torch runs its built-in
            operators for any process that connects there, and Python functions only if the call
            is signed; this process's own agent listens on loopback.
        ...: those of :class:`DistributedDataCollector`.

    Raises:
        ValueError: also for an address where nobody can listen, for options that TensorPipe does
            not know, and where this torch is built without RPC.
    """

    @takes(rank_arguments, without=("update_interval",))
    def __init__(self, given: Given) -> None:
        carrier = rpc_check.carrier(given)
        options = partial(_launch_options, given["visible_devices"])
        engine = check.engine_maker(given, carrier)
        LaunchedCollector.__init__(self, given, check_flag("sync", given["sync"]), options, engine)


def _launch_options(visible_devices: Any, devices: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The launcher's options of these ranks, none, once `visible_devices` fit them."""
    rpc_check.check_visible_devices(visible_devices, len(devices))
    return [{} for _ in devices]

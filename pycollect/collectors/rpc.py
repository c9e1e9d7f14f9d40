"""The collector that calls its ranks through torch.distributed.rpc."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pycollect.arguments import check_flag
from pycollect.collectors.arguments import distributed as check
from pycollect.collectors.arguments import rpc as rpc_check
from pycollect.collectors.binding import Arguments
from pycollect.collectors.distributed import DistributedDataCollector
from pycollect.collectors.launched import LaunchedCollector
from pycollect.collectors.signatures import RPCDataCollectorSignature
from pycollect.docstrings import completed_by


@completed_by(DistributedDataCollector, raises=False)
class RPCDataCollector(RPCDataCollectorSignature, DistributedDataCollector):
    """Collect in ranks that torch.distributed.rpc calls.

    A launcher starts the ranks on this machine or on others. Ranks that can open this process's
    memory write into the batch directly, as in :class:`DistributedDataCollector`. RPC carries
    requests and replies. Only this process calls the ranks, without a process group of all of them,
    so a rank that dies can be replaced.

    torch allows one RPC agent per process. If the program called `init_rpc` before the collector
    contacts ranks, its agent is used. Otherwise the collector creates an agent, which all
    collectors of this process share. Until the last of them is closed, `init_rpc` raises.

    Args:
        backend: Accepted and checked for compatibility with TorchRL. Weights also travel through
            RPC.
        visible_devices (Sequence[Any] | None = None): For compatibility with TorchRL: one device
            per rank. The devices are checked but not used, because rollouts travel in host memory
            and `storing_device` places the batches. A GPU gives a warning.
        tensorpipe_options (Mapping[str, Any] | None = None): Options of
            `TensorPipeRpcBackendOptions`: "num_worker_threads" (default: 16); "rpc_timeout",
            seconds in which a message must arrive, 0 for no limit (default: 0, because
            `worker_timeout` sets one); "_transports" (default: ["uv"]); and "_channels".
        tcp_address: Address of this machine to which ranks connect, and on which the agents of
            ranks listen, at any free port. torch executes its built-in operators for every process
            that connects there, but Python functions only if the call is signed. This process's own
            agent listens on the loopback interface. ``None``: loopback if all ranks are on this
            machine, else the interface that reaches other machines.
        ...: See DistributedDataCollector.

    Raises:
        TypeError: An argument has the wrong type or an unknown name, or cannot be pickled.
        ValueError: An argument is invalid, nothing can listen at `tcp_address`, TensorPipe does not
            know an option, or this torch was built without RPC.
    """

    def _make(self, given: Arguments) -> None:
        carrier = rpc_check.carrier(given)
        options = partial(_launch_options, given["visible_devices"])
        engine = check.engine_maker(given, carrier)
        LaunchedCollector.__init__(self, given, check_flag("sync", given["sync"]), options, engine)


def _launch_options(visible_devices: Any, devices: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Check `visible_devices`, and return empty launcher options, one per rank."""
    rpc_check.check_visible_devices(visible_devices, len(devices))
    return [{} for _ in devices]

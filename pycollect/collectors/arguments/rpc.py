"""The arguments that only the collector on torch.distributed.rpc has."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import rpc

from pycollect.engines.distributed.groups import check_backend
from pycollect.engines.distributed.link import Carrier

_DEFAULTS: dict[str, Any] = {"num_worker_threads": 16, "rpc_timeout": 0, "_transports": ["uv"]}
_KNOWN = (*_DEFAULTS, "_channels")


def carrier(given: Mapping[str, Any]) -> Carrier:
    """Check the arguments about messages, and return their carrier.

    Raises:
        TypeError, ValueError: An argument is invalid, or this build of torch has no RPC.
    """
    if not rpc.is_available():
        raise ValueError(
            "RPCDataCollector: this build of torch has no torch.distributed.rpc; use "
            "DistributedDataCollector"
        )
    check_backend(given["backend"])
    options = check_tensorpipe_options(given["tensorpipe_options"])
    # Imported late, because the import fails without RPC.
    from pycollect.engines.distributed.rpc_link import RpcCarrier

    return RpcCarrier(options)


def check_tensorpipe_options(value: Any) -> dict[str, Any]:
    """Return all options, with defaults.

    Raises:
        TypeError: The value is not a dict.
        ValueError: An option is unknown, or TensorPipe refuses it.
    """
    if not isinstance(value, Mapping | None):
        raise TypeError(f"tensorpipe_options: expected a dict or None, got {type(value).__name__}")
    options = {**_DEFAULTS, **(value or {})}
    if unknown := [name for name in options if name not in _KNOWN]:
        raise ValueError(f"tensorpipe_options: expected keys among {list(_KNOWN)}, got {unknown}")
    if flags := [name for name, own in options.items() if isinstance(own, bool)]:
        raise ValueError(
            f"tensorpipe_options: expected no bool for {flags}, got {dict(value or {})}"
        )
    try:
        rpc.TensorPipeRpcBackendOptions(**options)
    except (TypeError, RuntimeError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"tensorpipe_options: TensorPipe refused {options}: {text}") from error
    return options


def check_visible_devices(value: Any, ranks: int) -> None:
    """Raise TypeError or ValueError unless there is one device per rank; warn about GPUs."""
    if value is None:
        return
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"visible_devices: expected a list or None, got {type(value).__name__}")
    if len(value) != ranks:
        raise ValueError(
            f"visible_devices: expected one device per rank ({ranks}), got {len(value)}"
        )
    try:
        numbers = [("cuda", own) if isinstance(own, int) else (own,) for own in value]
        devices = [torch.device(*own) for own in numbers]
    except (RuntimeError, TypeError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"visible_devices: expected devices, got {value!r}: {text}") from error
    if any(own.type != "cpu" for own in devices):
        warnings.warn(
            "visible_devices: has no effect, because rollouts are sent through host memory; choose "
            "the device of batches with storing_device",
            UserWarning,
            stacklevel=2,
        )

"""The four arguments that name devices, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycollect.devices import Devices, check_here, named_device, numbered

NAMES = ("device", "storing_device", "env_device", "policy_device")


def check_devices(given: Mapping[str, Any], *, elsewhere: bool = False) -> Devices:
    """Check the arguments of one worker.

    Args:
        given: by name.
        elsewhere: environments and policy are on another machine, perhaps, which knows by itself
            what it has. Else devices get the index that the calling thread has for them: a worker
            process has another current device.

    Raises:
        ValueError: no device, or one that is not here (with the reason).
    """
    named = [_checked(name, given[name]) for name in NAMES]
    default, storing, *_ = named
    ours: tuple[str, ...] = NAMES
    if elsewhere:  # what says where batches lie
        ours = ("storing_device" if storing else "device" if default else "env_device",)
    for name, device in zip(NAMES, named, strict=True):
        if device is not None and name in ours:
            check_here(name, device)
    if not elsewhere:
        named = [device and numbered(device) for device in named]
    return Devices(*named)


def _checked(name: str, value: Any) -> torch.device | None:
    """A device, or a list with one per process, of which this is the first one's."""
    if isinstance(value, (list, tuple)):
        devices = [_checked(name, item) for item in value]
        return devices[0] if devices else None
    return None if value is None else named_device(name, value)


def check_one_place(devices: Sequence[Devices]) -> None:
    """Raise ValueError where the rollouts of several workers would have to be joined over places.

    Sync collectors join them.
    """
    if any(own.reported != devices[0].reported for own in devices):
        raise ValueError(
            "storing_device: expected one device for all workers of a sync collector, got "
            f"{[str(own.reported) for own in devices]}"
        )

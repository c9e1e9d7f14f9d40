"""Devices of workers."""

from __future__ import annotations

from typing import Any

import torch

from pycollect.devices import check_here, named_device


def device_of(name: str, device: Any) -> torch.device:
    """Return the torch device of an argument; ``None`` means CUDA if available, else the CPU.

    Raises:
        ValueError: The value is not a device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return named_device(name, device)


def device_here(name: str, device: Any) -> torch.device:
    """Return the device like `device_of`, if this process has it.

    Raises:
        ValueError: The value is not a device, or this process does not have it.
    """
    own = device_of(name, device)
    check_here(name, own)
    return own

"""Where workers compute."""

from __future__ import annotations

from typing import Any

import torch

from pycollect.devices import check_here, named_device


def device_of(name: str, device: Any) -> torch.device:
    """The torch device that an argument of that name tells; None: CUDA where it is, else the CPU.

    Raises:
        ValueError: it is none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return named_device(name, device)


def device_here(name: str, device: Any) -> torch.device:
    """The same, of this process.

    Raises:
        ValueError: also where it is not here.
    """
    own = device_of(name, device)
    check_here(name, own)
    return own

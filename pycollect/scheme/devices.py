"""Where workers compute."""

from __future__ import annotations

from typing import Any

import torch


def device_of(device: Any) -> torch.device:
    """The torch device that is named; None: CUDA where it is available, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)

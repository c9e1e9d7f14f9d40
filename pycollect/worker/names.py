"""Arguments of a worker as properties, under TorchRL's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from tensordict.nn import InteractionType

from pycollect.arguments import exposes
from pycollect.devices import Devices
from pycollect.worker.options import WorkerOptions


@exposes(WorkerOptions, "_worker_options")
class WorkerNames(ABC):
    """The arguments that configure a worker; if there are several workers, the first."""

    max_frames_per_traj: int
    exploration_type: InteractionType
    reset_at_each_iter: bool
    set_truncated: bool
    compact_obs: bool

    @property
    @abstractmethod
    def _worker_options(self) -> WorkerOptions:
        """Options of the worker."""

    @property
    def compiled_policy(self) -> bool:
        """Whether `compile_policy` was requested."""
        return self._worker_options.calling.compiled is not None

    @property
    def compiled_policy_kwargs(self) -> Mapping[str, Any]:
        """Arguments of ``torch.compile`` in `compile_policy`, by name."""
        return dict(self._worker_options.calling.compiled or {})

    @property
    def cudagraphed_policy(self) -> bool:
        """Whether `cudagraph_policy` was requested."""
        return self._worker_options.calling.graphed is not None

    @property
    def cudagraphed_policy_kwargs(self) -> Mapping[str, Any]:
        """Arguments in `cudagraph_policy`, by name."""
        return dict(self._worker_options.calling.graphed or {})


class DeviceNames(WorkerNames):
    """The device arguments of one worker; ``None`` if a device was not specified."""

    @property
    def _devices(self) -> Devices:
        return self._worker_options.devices

    @property
    def device(self) -> torch.device | None:
        """Default for the three other devices, or ``None`` if not specified."""
        return self._devices.default

    @property
    def storing_device(self) -> torch.device | None:
        """Value of ``td.device`` of a batch."""
        return self._devices.reported

    @property
    def env_device(self) -> torch.device | None:
        """Requested device of the environment, or ``None``."""
        return self._devices.env_device

    @property
    def policy_device(self) -> torch.device | None:
        """Requested device of the policy, or ``None``."""
        return self._devices.policy_device

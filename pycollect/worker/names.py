"""What TorchRL's collectors tell of the arguments of a worker, under TorchRL's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from tensordict.nn import InteractionType

from pycollect.arguments import tells
from pycollect.devices import Devices
from pycollect.worker.options import WorkerOptions


@tells(WorkerOptions, "_worker_options")
class WorkerNames(ABC):
    """The arguments that concern what a worker does; where there are several, of the first."""

    max_frames_per_traj: int
    exploration_type: InteractionType
    reset_at_each_iter: bool
    set_truncated: bool
    compact_obs: bool

    @property
    @abstractmethod
    def _worker_options(self) -> WorkerOptions:
        """What a worker was told."""

    @property
    def compiled_policy(self) -> bool:
        """Whether `compile_policy` was asked for."""
        return self._worker_options.calling.compiled is not None

    @property
    def compiled_policy_kwargs(self) -> Mapping[str, Any]:
        """Arguments of ``torch.compile`` that `compile_policy` named, by name."""
        return dict(self._worker_options.calling.compiled or {})

    @property
    def cudagraphed_policy(self) -> bool:
        """Whether `cudagraph_policy` was asked for."""
        return self._worker_options.calling.graphed is not None

    @property
    def cudagraphed_policy_kwargs(self) -> Mapping[str, Any]:
        """Arguments that `cudagraph_policy` named, by name."""
        return dict(self._worker_options.calling.graphed or {})


class DeviceNames(WorkerNames):
    """The device arguments of one worker, each with its default; None: nobody told."""

    @property
    def _devices(self) -> Devices:
        return self._worker_options.devices

    @property
    def device(self) -> torch.device | None:
        """Where the three others are which were not told; None: nobody told."""
        return self._devices.default

    @property
    def storing_device(self) -> torch.device | None:
        """What ``td.device`` of a batch says."""
        return self._devices.reported

    @property
    def env_device(self) -> torch.device | None:
        """Where the environment was told to lie."""
        return self._devices.env_device

    @property
    def policy_device(self) -> torch.device | None:
        """Where the policy was told to lie."""
        return self._devices.policy_device

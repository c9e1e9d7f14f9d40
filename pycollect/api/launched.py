"""Base of the collectors that can have workers on other machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycollect.api.binding import Arguments
from pycollect.api.central import Central
from pycollect.api.multi import ScheduledCollector
from pycollect.api.set_up import EngineOptions, SetUp, WorkerKind
from pycollect.compat.many_workers import Places
from pycollect.driver.options import RemoteOptions
from pycollect.transport.engine import Engine


class LaunchedCollector(ScheduledCollector):
    """A collector that runs one inner collector in each worker's process.

    Args:
        engine_options: Checks the engine's options for workers with these devices.
        engine: See :class:`ScheduledCollector`.
    """

    def __init__(
        self,
        given: Arguments,
        sync: bool,
        engine_options: EngineOptions,
        engine: Callable[[RemoteOptions], Engine],
    ) -> None:
        kind = WorkerKind.checked(given["collector_class"])
        name = "num_workers_per_collector"
        entries = kind.entries(given["create_env_fn"], given["num_collectors"], given[name], name)
        given = self._with_policies(given, len(entries))
        central = self._central(given, kind, len(entries), sync)
        set_up = SetUp.of(
            given,
            entries,
            engine_options,
            sync=sync,
            kind=kind,
            other_machines=True,
            central=central,
        )
        super().__init__(set_up, engine)

    def _with_policies(self, given: Arguments, workers: int) -> Arguments:
        """Return the arguments, with other policies if workers need them."""
        return given

    def _central(
        self, given: Arguments, kind: WorkerKind, workers: int, sync: bool
    ) -> Central | None:
        """Return the settings of central inference, or ``None`` if workers have copies."""
        return None

    @property
    def num_collectors(self) -> int:
        """Number of present workers."""
        return len(self._workers)

    @property
    def update_after_each_batch(self) -> bool:
        """Whether workers automatically get the policy's weights for each batch."""
        return self._remote.update_each

    @property
    def max_weight_update_interval(self) -> int:
        """Maximum number of a worker's batches between weight updates; -1 without a limit."""
        return self._remote.update_interval or -1

    @property
    def collected_frames(self) -> int:
        """Number of delivered frames."""
        return self._flow.statistics.frames

    @property
    def device(self) -> Places:
        """Each worker's default for the three other devices, or ``None``."""
        return tuple(own.default for own in self._devices_of_each)

    def local_policy(self) -> Any:
        """Return the policy that the collector was made with, by TorchRL's name.

        Returns:
            The policy in this process, not a worker's copy; ``None`` without a policy.
        """
        return self.policy

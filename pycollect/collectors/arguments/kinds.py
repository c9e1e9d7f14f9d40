"""The collector that each worker runs: one in its own process, or one with processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycollect import checks as check
from pycollect.arguments import arguments_of, checked_kwargs
from pycollect.collectors.arguments import workers as parse
from pycollect.collectors.arguments.kwargs import batched
from pycollect.envs import check_entry
from pycollect.scheduler.options import RemoteOptions
from pycollect.scheduler.records import WorkerPlan
from pycollect.scheduler.team import TeamMaker


@dataclass(frozen=True)
class WorkerKind:
    """The value of `collector_class`.

    Attributes:
        team: How the processes of each worker collect, "sync" or "async". None if it has none.
    """

    team: str | None = None

    @classmethod
    def checked(cls, value: Any) -> WorkerKind:
        """Return the kind for a collector class, its name, or TorchRL's class of that name."""
        name = value if isinstance(value, str) else getattr(value, "__name__", None)
        if not isinstance(name, str) or name not in _KINDS:
            raise ValueError(
                "collector_class: expected SyncDataCollector, a multi-process collector, or one of "
                f"'single', 'sync', 'async', got {value!r}"
            )
        return _KINDS[name]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names that `collector_kwargs` may contain."""
        own = () if self.team is None else arguments_of(RemoteOptions, in_kwargs=True)
        return (*parse.WORKER_ARGUMENTS, *own)

    @property
    def runs(self) -> str:
        """The class of the collector in each worker."""
        return _CLASSES[self.team]

    def entries(self, create_env_fn: Any, number: Any, count: Any, name: str) -> list[Any]:
        """Return the entry of each worker: a batch of environments, or a list with one per process.

        Args:
            number: Number of workers if `create_env_fn` is not a list.
            count: Number of environments or processes in each worker.
            name: Name of the argument with this count.

        Raises:
            ValueError: An entry is a list, and the count is not 1.
        """
        if self.team is None:
            return batched(parse.env_entries(create_env_fn, "num_collectors", number), count, name)
        entries = parse.env_entries(create_env_fn, "num_collectors", number, _check_team_entry)
        processes = check.check_positive(name, count)
        if processes != 1 and any(isinstance(entry, list) for entry in entries):
            raise ValueError(
                f"{name}: expected 1 because create_env_fn contains lists, got {processes}; each "
                "list has one entry per process"
            )
        return [entry if isinstance(entry, list) else [entry] * processes for entry in entries]

    def plans(
        self,
        plans: Sequence[WorkerPlan],
        remote: RemoteOptions,
        arguments: Sequence[Mapping[str, Any]],
    ) -> list[WorkerPlan]:
        """Return the plans for workers of this kind, made from plans for single collectors.

        Args:
            remote: Options of the outer collector; those about deaths also hold inside workers.
            arguments: Arguments of each worker.

        Raises:
            ValueError: An argument is invalid.
        """
        if self.team is None:
            return list(plans)
        result = []
        for plan, own in zip(plans, arguments, strict=True):
            check.check_env_kwargs(plan.spec.env_kwargs, len(plan.spec.entry))
            team = TeamMaker(_team_options(self.team == "sync", remote, own))
            result.append(replace(plan, spec=replace(plan.spec, team=team)))
        return result


_CLASSES = {
    None: "SyncDataCollector",
    "sync": "MultiSyncDataCollector",
    "async": "MultiaSyncDataCollector",
}

_KINDS = {
    name: kind
    for kind, names in {
        WorkerKind(): ("single", "Collector"),
        WorkerKind("sync"): ("sync", "MultiSyncCollector"),
        WorkerKind("async"): ("async", "MultiAsyncCollector"),
    }.items()
    for name in (kind.runs, *names)
}


def _check_team_entry(entry: Any) -> Any:
    """Return the entry of each process of a worker, or a list with one entry per process."""
    if not isinstance(entry, (list, tuple)):
        return check_entry(entry)
    if not entry:
        raise ValueError("create_env_fn: expected at least one entry per worker, got an empty list")
    return [check_entry(item) for item in entry]


def _team_options(sync: bool, remote: RemoteOptions, own: Mapping[str, Any]) -> RemoteOptions:
    try:
        own_options = checked_kwargs(RemoteOptions, {**own, "sync": sync})
    except (TypeError, ValueError) as error:
        raise type(error)(f"collector_kwargs: {error}") from None
    return replace(
        remote,
        sync=sync,
        # The outer collector stops the team; its processes only make their minimum of steps.
        preemption=remote.preemption and replace(remote.preemption, threshold=1.0),
        padded=remote.uneven,
        update_each=False,
        update_interval=0,
        **own_options,
    )

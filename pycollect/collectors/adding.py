"""Workers that are added to a collector: with the arguments of those that are there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pycollect.collectors.arguments import workers as parse
from pycollect.collectors.arguments.devices import check_devices
from pycollect.collectors.arguments.kinds import WorkerKind
from pycollect.collectors.arguments.kwargs import merged_arguments
from pycollect.devices import Devices
from pycollect.scheduler.options import RemoteOptions
from pycollect.scheduler.records import WorkerPlan

_SINGLE = WorkerKind()


class PolicyServer(Protocol):
    """Calls the policy for workers.

    Attributes:
        groups: of each worker's environments.
    """

    groups: int

    def policies(self, count: int) -> Sequence[Any]:
        """What stands for the policy in so many more workers; pickles."""


@dataclass(frozen=True)
class WorkerTemplate:
    """What the workers of a collector are made of, but for their environments and the policy.

    Attributes:
        values: of WORKER_ARGUMENTS, as the collector was given them.
        passed: which of them the caller really gave, and which go before `collector_kwargs`.
        collector_kwargs: None, a dict, or one per worker.
        share: frames of one rollout of each.
        elsewhere: they may be on machines that have other devices.
        kind: what each of them runs.
        server: calls the policy for them; None: they do.
    """

    values: Mapping[str, Any]
    passed: Collection[str]
    collector_kwargs: Any
    share: int
    elsewhere: bool = False
    kind: WorkerKind = _SINGLE
    server: PolicyServer | None = None

    def arguments(self, collector_kwargs: Any, workers: int) -> list[dict[str, Any]]:
        """Those of so many new workers; None: as the first ones, unless each had its own."""
        values = {name: parse.one_for_all(None, value) for name, value in self.values.items()}
        passed = {name for name in self.passed if values.get(name) is self.values.get(name)}
        kwargs = parse.one_for_all(collector_kwargs, self.collector_kwargs)
        return merged_arguments(
            values, passed, kwargs, workers, self.kind.arguments, self.kind.runs
        )


@dataclass(frozen=True)
class NewWorkers:
    """What `add_collectors` was given.

    Attributes:
        options: gives those of the engine for workers with these devices, checked.
    """

    create_env_fn: Any
    num_envs: Any
    policy: Any
    collector_kwargs: Any
    options: Callable[[Sequence[Devices]], Sequence[Mapping[str, Any]]]

    def plans(
        self, template: WorkerTemplate, remote: RemoteOptions, policy: Any, first: int
    ) -> list[WorkerPlan]:
        """Check all of it, and say what the workers are made from.

        Args:
            policy: the collector's, None where workers built it.
            first: the id of the first one.
        """
        many = isinstance(self.create_env_fn, (list, tuple))
        kind, elsewhere = template.kind, template.elsewhere
        entries = kind.entries(self.create_env_fn, None if many else 1, self.num_envs, "num_envs")
        arguments = template.arguments(self.collector_kwargs, len(entries))
        for entry, own in zip(entries, arguments, strict=True):
            parse.check_groups(
                entry,
                own["env_groups"],
                server=None if template.server is None else template.server.groups,
                teams=kind.team is not None,
            )
        devices = [check_devices(own, elsewhere=elsewhere) for own in arguments]
        factory = any(own["policy_factory"] is not None for own in arguments)
        given = policy if self.policy is None and not factory else self.policy
        if given is None and remote.built_by_workers and not factory and template.server is None:
            raise ValueError(
                "policy: expected one, or a policy_factory in collector_kwargs, as the "
                "collector was made with one policy_factory for each worker"
            )
        sources, built_by_workers = parse.policy_sources(arguments, given)
        working = devices
        if template.server is not None:
            built_by_workers, working = False, [own.of_stepping for own in devices]
            if self.policy is not None:
                raise ValueError(
                    "policy: expected None, as inference='central' calls the collector's policy "
                    "for all workers"
                )
            sources = [*template.server.policies(len(entries))]
        plans = parse.worker_plans(
            entries,
            arguments,
            sources,
            built_by_workers,
            [template.share] * len(entries),
            self.options(working),
            devices,
            first,
            remote.masked,
            elsewhere,
            remote.compress,
        )
        return kind.plans(plans, remote, arguments)

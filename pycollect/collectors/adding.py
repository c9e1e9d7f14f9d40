"""Workers that are added to a running collector, with the arguments of the others."""

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
        groups: Number of groups of each worker's environments.
    """

    groups: int

    def policies(self, count: int) -> Sequence[Any]:
        """Return picklable stand-ins for the policy, for `count` more workers."""


@dataclass(frozen=True)
class WorkerTemplate:
    """The arguments of a collector's workers, except their environments and the policy.

    Attributes:
        values: Values of WORKER_ARGUMENTS as passed to the collector.
        passed: Names that the caller passed; they override `collector_kwargs`.
        collector_kwargs: None, a dict, or one per worker.
        share: Frames of one rollout of each worker.
        elsewhere: The workers may be on machines with other devices.
        kind: Kind of collector that each worker runs.
        server: Calls the policy for the workers. None if they call it.
    """

    values: Mapping[str, Any]
    passed: Collection[str]
    collector_kwargs: Any
    share: int
    elsewhere: bool = False
    kind: WorkerKind = _SINGLE
    server: PolicyServer | None = None

    def arguments(self, collector_kwargs: Any, workers: int) -> list[dict[str, Any]]:
        """Return the arguments of new workers; None means those of the first workers.

        If each of the first workers had its own value, the default applies.
        """
        values = {name: parse.one_for_all(None, value) for name, value in self.values.items()}
        passed = {name for name in self.passed if values.get(name) is self.values.get(name)}
        kwargs = parse.one_for_all(collector_kwargs, self.collector_kwargs)
        return merged_arguments(
            values, passed, kwargs, workers, self.kind.arguments, self.kind.runs
        )


@dataclass(frozen=True)
class NewWorkers:
    """The arguments of `add_collectors`.

    Attributes:
        options: Returns checked engine options for workers with these devices.
    """

    create_env_fn: Any
    num_envs: Any
    policy: Any
    collector_kwargs: Any
    options: Callable[[Sequence[Devices]], Sequence[Mapping[str, Any]]]

    def plans(
        self, template: WorkerTemplate, remote: RemoteOptions, policy: Any, first: int
    ) -> list[WorkerPlan]:
        """Check the arguments, and return the plans of the workers.

        Args:
            policy: The collector's policy; None if workers built it.
            first: Id of the first new worker.
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
                "policy: expected a policy, or a policy_factory in collector_kwargs, got neither; "
                "each of the collector's workers has its own policy_factory"
            )
        sources, built_by_workers = parse.policy_sources(arguments, given)
        working = devices
        if template.server is not None:
            built_by_workers, working = False, [own.of_stepping for own in devices]
            if self.policy is not None:
                raise ValueError(
                    "policy: expected None because inference='central' calls the collector's "
                    f"policy for all workers, got {type(self.policy).__name__}"
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

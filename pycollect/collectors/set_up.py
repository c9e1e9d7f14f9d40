"""The checked arguments of a collector with workers in other processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pycollect.arguments import checked
from pycollect.collectors.adding import PolicyServer, WorkerTemplate
from pycollect.collectors.arguments import workers as parse
from pycollect.collectors.arguments.devices import check_devices, check_one_place
from pycollect.collectors.arguments.kinds import WorkerKind
from pycollect.collectors.arguments.kwargs import merged_arguments
from pycollect.collectors.binding import Arguments
from pycollect.devices import Devices
from pycollect.scheduler.options import RemoteOptions, check_uneven
from pycollect.scheduler.records import WorkerPlan
from pycollect.stream.options import StreamOptions

EngineOptions = Callable[[Sequence[Devices]], Sequence[Mapping[str, Any]]]
"""Returns checked engine options for workers with these devices."""


@dataclass(frozen=True)
class SetUp:
    """All arguments, checked before anything starts.

    Attributes:
        template: Template of workers that are added later.
    """

    options: StreamOptions
    remote: RemoteOptions
    plans: Sequence[WorkerPlan]
    template: WorkerTemplate
    policy: Any

    @classmethod
    def of(
        cls,
        given: Arguments,
        entries: Sequence[Any],
        shares: Sequence[int],
        engine_options: EngineOptions,
        *,
        sync: bool,
        passed: Collection[str] = (),
        collector_kwargs: Any = None,
        kind: WorkerKind | None = None,
        elsewhere: bool = False,
        server: PolicyServer | None = None,
    ) -> SetUp:
        """Check the arguments; errors start with an argument's name.

        Args:
            entries: One entry of `create_env_fn` per worker.
            shares: Frames of one rollout of each worker.
            passed: Arguments that override `collector_kwargs`.
            kind: Kind of collector that each worker runs; None for a single one.
            elsewhere: Workers may be on machines with other devices.
            server: Calls the policy for the workers. None if they call it.
        """
        kind = kind or WorkerKind()
        values = {name: given[name] for name in parse.WORKER_ARGUMENTS}
        arguments = merged_arguments(
            values, passed, collector_kwargs, len(entries), kind.arguments, kind.runs
        )
        devices = [check_devices(own, elsewhere=elsewhere) for own in arguments]
        if sync:
            check_one_place(devices)
        options = checked(StreamOptions, given.instead(**parse.common_values(arguments)))
        # With factories, a policy only provides weights; an updater would not know of it.
        beside = given["weight_updater"] is None
        sources, built_by_workers = parse.policy_sources(arguments, given["policy"], beside)
        built = built_by_workers
        if server is not None:  # the server builds the policy, workers do not
            sources, built = [*server.policies(len(entries))], False
        remote = RemoteOptions.checked(
            given,
            sync=sync,
            built_by_workers=built_by_workers,
            apart=options.replay_buffer is not None,
            shares=shares,
        )
        lists = any(isinstance(entry, list) for entry in entries)
        check_uneven(remote.joined, remote.uneven, batched=lists)
        for entry, own in zip(entries, arguments, strict=True):
            parse.check_groups(
                entry,
                own["env_groups"],
                server=None if server is None else server.groups,
                teams=kind.team is not None,
            )
        plans = parse.worker_plans(
            entries,
            arguments,
            sources,
            built,
            shares,
            engine_options(devices if server is None else [own.of_stepping for own in devices]),
            devices,
            mask=remote.masked,
            elsewhere=elsewhere,
            compress=remote.compress,
        )
        share = -(-options.frames_per_batch // (len(entries) if sync else 1))
        template = WorkerTemplate(
            values, set(passed), collector_kwargs, share, elsewhere, kind, server
        )
        return cls(options, remote, kind.plans(plans, remote, arguments), template, given["policy"])

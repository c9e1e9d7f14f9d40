"""Turn the arguments of a collector with worker processes into the plans of its workers.

The order is: split the arguments per worker, check the options, make the plans, and check that the
plans fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pycollect import checks as check
from pycollect.api import arguments as parse
from pycollect.api.arguments import check_devices, merged_arguments
from pycollect.api.binding import Arguments
from pycollect.arguments import arguments_of, checked, checked_kwargs
from pycollect.compat.weight_options import WeightOptions
from pycollect.data.devices import Devices
from pycollect.driver.nest import Nest
from pycollect.driver.options import RemoteOptions, StreamOptions, check_uneven
from pycollect.driver.records import WorkerPlan
from pycollect.envs.make import check_entry
from pycollect.transport.messages import WorkerSpec
from pycollect.transport.pickling import pickled_for_child, pickled_spec
from pycollect.worker.options import WorkerOptions


@dataclass(frozen=True)
class WorkerKind:
    """The value of `collector_class`."""

    nest: str | None = None  # how the processes of a worker collect, "sync" or "async"; None: none

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
        of_nest = () if self.nest is None else arguments_of(RemoteOptions, in_kwargs=True)
        return (*parse.WORKER_ARGUMENTS, *of_nest)

    @property
    def runs(self) -> str:
        """The class of the collector in each worker."""
        return _CLASSES[self.nest]

    def entries(self, create_env_fn: Any, number: Any, count: Any, name: str) -> list[Any]:
        """Return the entry of each worker: a batch of environments, or a list with one per process.

        Args:
            number: Number of workers if `create_env_fn` is not a list.
            count: Number of environments or processes in each worker.
        """
        checked_entry = check_entry if self.nest is None else _check_nest_entry
        entries = parse.env_entries(create_env_fn, "num_collectors", number, checked_entry)
        count = check.check_positive(name, count)
        for entry in entries if count > 1 else ():
            if isinstance(entry, list) or (self.nest is None and not callable(entry)):
                kind = "lists" if isinstance(entry, list) else "an environment"
                raise ValueError(
                    f"{name}: expected 1 because create_env_fn contains {kind}, got {count}; pass "
                    "a callable that makes one environment"
                )
        if self.nest is None and count == 1:
            return entries
        return [entry if isinstance(entry, list) else [entry] * count for entry in entries]

    def maker(
        self, remote: RemoteOptions, arguments: Mapping[str, Any]
    ) -> Callable[..., Nest] | None:
        """Return the function that makes the processes of a worker, or None if it has none.

        The options `remote` of the outer collector that are about deaths also hold inside workers.
        """
        if self.nest is None:
            return None
        return partial(Nest, options=_nest_options(self.nest == "sync", remote, arguments))


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


def _check_nest_entry(entry: Any) -> Any:
    """Return the entry of each process of a worker, or a list with one entry per process."""
    if not isinstance(entry, (list, tuple)):
        return check_entry(entry)
    if not entry:
        raise ValueError("create_env_fn: expected at least one entry per worker, got an empty list")
    return [check_entry(item) for item in entry]


def _nest_options(sync: bool, remote: RemoteOptions, arguments: Mapping[str, Any]) -> RemoteOptions:
    try:
        given = checked_kwargs(RemoteOptions, {**arguments, "sync": sync})
    except (TypeError, ValueError) as error:
        raise type(error)(f"collector_kwargs: {error}") from None
    return replace(
        remote,
        sync=sync,
        # The outer collector stops the nest; its processes only make their minimum of steps.
        preemption=remote.preemption and replace(remote.preemption, threshold=1.0),
        padded=remote.uneven,
        update_each=False,
        update_interval=0,
        **given,
    )


if TYPE_CHECKING:
    from pycollect.api.central import Central
    from pycollect.inference.client import ClientSlots

EngineOptions = Callable[[Sequence[Devices]], Sequence[Mapping[str, Any]]]
"""Returns checked engine options for workers with these devices."""

_SINGLE = WorkerKind()


def no_options(devices: Sequence[Devices]) -> list[Mapping[str, Any]]:
    """Return empty engine options, one per worker."""
    return [{} for _ in devices]


@dataclass(frozen=True)
class WorkerTemplate:
    """The common arguments of a collector's workers; makes plans of first and later workers."""

    values: Mapping[str, Any]  # values of WORKER_ARGUMENTS as passed to the collector
    passed: Collection[str]  # names that the caller passed; they override `collector_kwargs`
    collector_kwargs: Any  # None, a dict, or one per worker
    share: int  # frames of one rollout
    remote: RemoteOptions
    kind: WorkerKind = _SINGLE
    other_machines: bool = False  # the workers may be on machines with other devices
    central: Central | None = None  # calls the policy for the workers; None if they call it

    def arguments(self, collector_kwargs: Any, workers: int) -> list[dict[str, Any]]:
        """Return the arguments of later workers; ``None`` means those of the first workers.

        For an argument with one value per first worker, the default applies.
        """
        values = {name: parse.one_for_all(None, value) for name, value in self.values.items()}
        passed = {name for name in self.passed if values.get(name) is self.values.get(name)}
        kwargs = parse.one_for_all(collector_kwargs, self.collector_kwargs)
        return merged_arguments(
            values, passed, kwargs, workers, self.kind.arguments, self.kind.runs
        )

    def plans(
        self,
        entries: Sequence[Any],
        arguments: Sequence[Mapping[str, Any]],
        policies: tuple[Sequence[Any], bool],
        engine_options: EngineOptions,
        shares: Sequence[int] = (),
        first: int = 0,
    ) -> list[WorkerPlan]:
        """Return the checked plans of workers.

        Args:
            policies: Policy or factory of each worker, and whether they are factories.
            shares: Frames of one rollout of each worker, if they differ.
        """
        remote, central = self.remote, self.central
        devices = [check_devices(each, other_machines=self.other_machines) for each in arguments]
        (sources, built), stepping = policies, devices
        if central is not None:  # the server builds the policy, workers do not
            sources, built = central.clients.policies(len(entries)), False
            stepping = [replace(each, policy=None) for each in devices]
        options = engine_options(stepping)
        each = zip(
            entries, arguments, devices, options, shares or [self.share] * len(entries), strict=True
        )
        specs = [self.spec(first + index, *own, built) for index, own in enumerate(each)]
        for spec in specs:  # only children of this process inherit memory that a spec refers to
            _ = pickled_spec(spec) if self.other_machines else pickled_for_child(spec)
        pickled = parse.pickled_policies(sources, built)
        check_specs(specs, remote, None if central is None else central.clients)
        copy = central.copy if central is not None and self.other_machines else None
        return [
            WorkerPlan(*parts, copy=copy) for parts in zip(specs, pickled, options, strict=True)
        ]

    def spec(
        self,
        index: int,
        entry: Any,
        arguments: Mapping[str, Any],
        devices: Devices,
        engine_options: Mapping[str, Any],
        frames: int,
        builds_policy: bool,
    ) -> WorkerSpec:
        """Return the checked spec of a worker whose rollouts have that many frames."""
        maker = self.kind.maker(self.remote, arguments)
        kwargs = arguments["create_env_kwargs"]
        if maker is not None and isinstance(kwargs, (list, tuple)):
            kwargs = parse.dict_each("create_env_kwargs", kwargs, len(entry), "process")
        else:
            kwargs = check.check_named("create_env_kwargs", kwargs)
        own = {"mask": self.remote.masked, "compress": self.remote.compress, "devices": devices}
        return WorkerSpec(
            index,
            entry,
            kwargs,
            replace(checked(WorkerOptions, arguments, **own), frames=frames),
            builds_policy=builds_policy,
            # Each process that opens a GPU takes memory of it. If no device was specified, GPUs are
            # hidden only if the engine counts them and gives the worker none.
            hides_gpus=devices.worker_types == {"cpu"}
            or (not devices.worker_types and engine_options.get("num_gpus", 1) == 0),
            maker=maker,
        )

    def later_plans(
        self,
        create_env_fn: Any,
        num_envs: Any,
        policy: Any,
        collector_kwargs: Any,
        engine_options: EngineOptions,
        own_policy: Any,
        first: int,
    ) -> list[WorkerPlan]:
        """Check the arguments of `add_collectors`, and return the plans of the workers.

        `own_policy` is the collector's policy, None if workers built it.
        """
        number = None if isinstance(create_env_fn, (list, tuple)) else 1
        entries = self.kind.entries(create_env_fn, number, num_envs, "num_envs")
        arguments = self.arguments(collector_kwargs, len(entries))
        factory = any(each["policy_factory"] is not None for each in arguments)
        given = own_policy if policy is None and not factory else policy
        if self.central is not None and policy is not None:
            raise ValueError(
                "policy: expected None because inference='central' calls the collector's policy "
                f"for all workers, got {type(policy).__name__}"
            )
        built = self.remote.built_by_workers and self.central is None
        if given is None and built and not factory:
            raise ValueError(
                "policy: expected a policy, or a policy_factory in collector_kwargs, got neither; "
                "each of the collector's workers has its own policy_factory"
            )
        policies = parse.policy_sources(arguments, given)
        return self.plans(entries, arguments, policies, engine_options, first=first)


@dataclass(frozen=True)
class SetUp:
    """All arguments, checked before anything starts."""

    options: StreamOptions
    weights: WeightOptions
    plans: Sequence[WorkerPlan]
    template: WorkerTemplate  # makes the plans of workers that are added later
    policy: Any

    @classmethod
    def of(
        cls,
        given: Arguments,
        entries: Sequence[Any],
        engine_options: EngineOptions = no_options,
        *,
        sync: bool,
        shares: Sequence[int] = (),
        kind: WorkerKind = _SINGLE,
        other_machines: bool = False,
        central: Central | None = None,
    ) -> SetUp:
        """Check the arguments; errors start with an argument's name.

        Args:
            entries: One entry of `create_env_fn` per worker.

        For the other arguments see :class:`WorkerTemplate`.
        """
        given = given if central is None else central.given
        workers = len(entries)

        values = {name: given[name] for name in parse.WORKER_ARGUMENTS}
        kwargs = given.get("collector_kwargs")
        passed = given.passed if "collector_kwargs" in given else ()
        arguments = merged_arguments(values, passed, kwargs, workers, kind.arguments, kind.runs)

        common = {**given, **parse.common_values(arguments)}
        weights = checked(WeightOptions, common)
        options = weights.stream(checked(StreamOptions, common))
        remote = RemoteOptions.checked(
            given,
            sync=sync,
            built_by_workers=any(each["policy_factory"] is not None for each in arguments),
            separate=options.replay_buffer is not None,
            uneven=len(set(shares)) > 1,
        )
        share = -(-options.frames_per_batch // (workers if sync else 1))

        # With factories, a policy only provides weights; an updater would not know of it.
        with_policy = given["weight_updater"] is None
        policies = parse.policy_sources(arguments, given["policy"], with_policy)
        template = WorkerTemplate(
            values, passed, kwargs, share, remote, kind, other_machines, central
        )
        plans = template.plans(entries, arguments, policies, engine_options, shares)
        return cls(options, weights, plans, template, given["policy"])


def check_specs(
    specs: Sequence[WorkerSpec], remote: RemoteOptions, server: ClientSlots | None
) -> None:
    """Raise ValueError if workers do not fit together, or an argument does not fit another."""
    for spec in specs:
        parse.check_groups(
            spec.entry,
            spec.options.env_groups,
            server=None if server is None else server.groups,
            is_nest=spec.maker is not None,
        )
    places = [spec.options.devices.reported for spec in specs]
    if remote.sync and any(place != places[0] for place in places):
        raise ValueError(
            "storing_device: expected one device for all workers of a sync collector, got "
            f"{[str(place) for place in places]}"
        )
    batched = any(isinstance(spec.entry, list) for spec in specs)
    check_uneven(remote.joined, remote.uneven, batched)
    if specs[0].maker is not None and remote.preemption is not None and remote.joined != "stack":
        raise ValueError(
            "cat_results: expected 'stack' with preemptive_threshold and a multi-process "
            f"collector_class, got {remote.joined}; stopped processes end at different steps"
        )

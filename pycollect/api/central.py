"""Central inference: what goes with it, and what is made of the arguments then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pycollect import checks as check
from pycollect._core import Bell
from pycollect.api import arguments as parse
from pycollect.api.arguments import check_devices
from pycollect.api.binding import Arguments
from pycollect.arguments import checked
from pycollect.data.devices import CPU
from pycollect.data.weights import device_of
from pycollect.driver.policy_server import ProcessPlan
from pycollect.driver.records import WorkerPlan
from pycollect.envs.groups import check_env_groups
from pycollect.inference.options import InferenceOptions, ServerSettings
from pycollect.policy.runner import build
from pycollect.transport.messages import WorkerSpec
from pycollect.transport.processes.engine import ProcessEngine
from pycollect.worker.options import WorkerOptions

if TYPE_CHECKING:  # imported once it is asked for
    from pycollect.inference.client import ClientSlots
    from pycollect.inference.in_driver import PendingCounter, ServingBell
    from pycollect.inference.policy_worker import PolicyWorkerMaker
    from pycollect.inference.server import InferenceServer

_SERVER = -1  # the id of what is no worker of the collector
_TIMEOUT = 0.01  # seconds, as TorchRL's


@dataclass(frozen=True)
class Elsewhere:
    """How the policy is called for workers on other nodes: by a server on each of them.

    Attributes:
        policy: to be copied; None where there is a factory.
    """

    policy: Any
    factory: Callable[[], Any] | None
    settings: ServerSettings

    @property
    def needs_gpu(self) -> bool:
        """Whether the policy is called on one."""
        device = self.settings.device
        return device is not None and device.type == "cuda"

    def plan(self) -> WorkerPlan:
        """What a server is made from; TypeError where the policy does not pickle."""
        from pycollect.inference.policy_worker import PolicyWorkerMaker

        maker = PolicyWorkerMaker(self.settings)
        return _plan(self.policy, self.factory, self.settings, maker)


@dataclass(frozen=True)
class Central:
    """One policy for all workers of a collector, which is not called by them.

    Attributes:
        given: the arguments, with the policy that a factory built here in its place.
        clients: of the workers.
        server: calls the policy in this process; or what the process that does is made from.
        bell: on which this process waits for workers, and serves them; None where it does not.
        elsewhere: for workers on other nodes.
    """

    given: Arguments
    clients: ClientSlots
    server: InferenceServer | WorkerPlan
    elsewhere: Elsewhere
    bell: ServingBell | None = None

    @classmethod
    def of(cls, given: Arguments, workers: int, *, sync: bool) -> Central | None:
        """Check the arguments; return None if each worker calls the policy itself.

        For a sync collector, this process calls the policy; otherwise a process of its own does.

        Raises:
            ValueError: An argument cannot be combined with central inference.
        """
        options = checked(InferenceOptions, given)
        if not options.central:
            return None
        device = _one_device(given, workers)
        factory = _one_factory(given)
        check.check_factory(factory, given["policy"])
        check.check_policy(given["policy"])
        if factory is None and given["policy"] is None:
            raise ValueError(
                "inference: expected None without a policy, got 'central'; the workers draw random "
                "actions themselves"
            )
        settings = ServerSettings(
            _patient(options, given, sync),
            device,
            check.check_exploration("exploration_type", given["exploration_type"]),
            workers,
            check_env_groups("env_groups", given["env_groups"]),
        )
        # Nobody knows on another node who of its workers collects, so that none waits for all.
        alone = replace(settings, options=_patient(options, given, sync=False))
        policy = given["policy"]
        elsewhere = Elsewhere(policy, factory, _unnumbered(_copied(alone, policy)))
        own = cls._here if sync else cls._in_a_process
        return own(given, settings, elsewhere)

    def serving(self, start_method: str) -> InferenceServer | ProcessPlan:
        """Who calls the policy, as a scheduler is told.

        Args:
            start_method: of the process that does, if there is to be one.
        """
        if isinstance(self.server, WorkerPlan):
            return ProcessPlan(self.server, ProcessEngine(start_method))
        return self.server

    @classmethod
    def _here(cls, given: Arguments, settings: ServerSettings, elsewhere: Elsewhere) -> Central:
        """Called by whoever awaits a batch."""
        from pycollect.inference.client import ClientSlots
        from pycollect.inference.in_driver import ServingBell
        from pycollect.inference.server import InferenceServer

        factory = given["policy_factory"]
        policy = given["policy"] if factory is None else build(factory)
        clients = ClientSlots(Bell(), settings.groups)
        server = InferenceServer(settings, policy, clients.slots, is_owned=factory is not None)
        own = given.instead(policy=policy, policy_factory=None)
        return cls(own, clients, server, elsewhere, ServingBell(clients.bell, server))

    @classmethod
    def _in_a_process(
        cls, given: Arguments, settings: ServerSettings, elsewhere: Elsewhere
    ) -> Central:
        """Called by a process that does nothing else."""
        from pycollect.inference.client import ClientSlots
        from pycollect.inference.policy_worker import PolicyWorkerMaker

        settings = _copied(settings, given["policy"])
        clients = ClientSlots(Bell(), settings.groups)
        addresses = clients.slots.address, clients.bell.address
        maker = PolicyWorkerMaker(settings, addresses)
        plan = _plan(given["policy"], given["policy_factory"], settings, maker)
        return cls(given, clients, plan, elsewhere)


def _copied(settings: ServerSettings, policy: Any) -> ServerSettings:
    """The settings of who calls a copy of a policy: where that lies, if nobody named a device."""
    lies = device_of(policy)
    if settings.device is None and lies is not None and lies != CPU:
        return replace(settings, device=lies)
    return settings


def _unnumbered(settings: ServerSettings) -> ServerSettings:
    """The same on another machine, where an actor sees none but its own GPU."""
    device = settings.device
    return settings if device is None else replace(settings, device=torch.device(device.type))


def _plan(
    policy: Any, factory: Any, settings: ServerSettings, maker: PolicyWorkerMaker
) -> WorkerPlan:
    """What a server in another process is made from."""
    spec = WorkerSpec(
        _SERVER,
        None,
        None,
        WorkerOptions(0, num_threads=torch.get_num_threads()),
        builds_policy=factory is not None,
        hides_gpus=settings.device == CPU,
        team=maker,
        role="policy server",
    )
    (pickled,) = parse.pickled_policies([factory or policy], factory is not None)
    return WorkerPlan(spec, pickled, {})


E = TypeVar("E", bound="PendingCounter")


def watched(bell: ServingBell | None, engine: E) -> E:
    """The engine whose workers ring that bell, if it serves them."""
    if bell is not None:
        bell.watch(engine)
    return engine


def _one_device(given: Mapping[str, Any], workers: int) -> Any:
    """Return the device on which the policy is called; None for the policy's own device."""
    each = parse.of_each_worker({name: given[name] for name in parse.ONE_EACH}, workers)
    devices = [check_devices(own).policy_device for own in each]
    if any(device != devices[0] for device in devices):
        raise ValueError(
            f"policy_device: expected one device, got {[str(device) for device in devices]}; "
            "inference='central' calls one policy for all workers"
        )
    return devices[0]


def _one_factory(given: Mapping[str, Any]) -> Any:
    factory = given["policy_factory"]
    if isinstance(factory, (list, tuple)):
        raise ValueError(
            f"policy_factory: expected one callable, got a list of {len(factory)}; "
            "inference='central' calls one policy for all workers"
        )
    return factory


def _patient(options: InferenceOptions, given: Mapping[str, Any], sync: bool) -> InferenceOptions:
    """For whom a call waits where nobody told.

    Workers of a sync batch wait for each other in any case, unless stragglers are stopped; others
    for nobody.
    """
    if sync and given["preemptive_threshold"] is None:
        return options
    least, timeout = options.min_batch_size, options.server_timeout
    return replace(
        options,
        min_batch_size=1 if least is None and not sync else least,
        server_timeout=_TIMEOUT if timeout is None else timeout,
    )

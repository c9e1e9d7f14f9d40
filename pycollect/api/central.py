"""Check the arguments of central inference, and create the policy's server from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pycollect import checks as check
from pycollect._core import Bell
from pycollect.api import arguments as parse
from pycollect.api.arguments import check_devices
from pycollect.api.binding import Arguments
from pycollect.arguments import checked
from pycollect.data.devices import CPU
from pycollect.data.weights import device_of
from pycollect.driver.policy_place import InDriver, PlaceMaker
from pycollect.driver.policy_process import InPolicyProcess
from pycollect.driver.records import WorkerPlan
from pycollect.inference.options import InferenceOptions, ServerSettings
from pycollect.transport.messages import WorkerSpec
from pycollect.transport.pickling import pickled
from pycollect.transport.processes.engine import ProcessEngine
from pycollect.worker.options import WorkerOptions

if TYPE_CHECKING:  # at run time, imported only for central inference
    from pycollect.inference.client import ClientSlots
    from pycollect.inference.server import ServingBell

_SERVER = -1  # worker id of a policy server
_TIMEOUT = 0.01  # seconds, as in TorchRL


@dataclass(frozen=True)
class Central:
    """Central inference: one server calls the policy for all workers of a collector.

    Attributes:
        given: Arguments of the collector. If this process has called a policy factory, they contain
            its policy instead.
        copy: Pickles the policy for a worker that shares no memory with its server. Raises
            TypeError if the policy cannot be pickled.
        place: Makes the PolicyPlace, for the start method of an inference process.
        bell: Bell on which this process waits for requests and serves them. Defaults to ``None``:
            another process is the server.
    """

    given: Arguments
    clients: ClientSlots
    copy: Callable[[], bytes]
    place: Callable[[str], PlaceMaker]
    bell: ServingBell | None = None

    @classmethod
    def of(cls, given: Arguments, workers: int, *, sync: bool) -> Central | None:
        """Check the arguments; return None if each worker calls the policy itself.

        For a sync collector, this process calls the policy. For an async one, a separate process
        does.
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
            _with_wait_defaults(options, given, sync),
            device,
            check.check_exploration("exploration_type", given["exploration_type"]),
            workers,
            check.check_env_groups("env_groups", given["env_groups"]),
            measures=not sync and options.min_batch_size is None,
        )
        make = cls._in_driver if sync else cls._in_process
        return make(given, settings)

    @classmethod
    def _in_driver(cls, given: Arguments, settings: ServerSettings) -> Central:
        """Create a server in this process, which calls the policy while it waits for a batch."""
        from pycollect.inference.client import ClientSlots
        from pycollect.inference.server import InferenceServer, ServingBell

        factory = given["policy_factory"]
        policy = given["policy"] if factory is None else check.built_policy(factory)
        clients = ClientSlots(Bell(), settings.groups)
        server = InferenceServer(settings, policy, clients.slots, is_owned=factory is not None)
        arguments = given.instead(policy=policy, policy_factory=None)
        return cls(
            arguments,
            clients,
            copy=lambda: parse.pickled_policies([policy], False)[0],
            place=lambda _: partial(InDriver, server),
            bell=ServingBell(clients.bell, server),
        )

    @classmethod
    def _in_process(cls, given: Arguments, settings: ServerSettings) -> Central:
        """Plan a separate process that calls the policy."""
        from pycollect.inference.client import ClientSlots
        from pycollect.inference.server import PolicyWorker

        device = device_of(given["policy"])
        if settings.device is None and device not in (None, CPU):
            settings = replace(settings, device=device)
        clients = ClientSlots(Bell(), settings.groups)
        slots, bell = clients.slots.address, clients.bell.address
        factory = given["policy_factory"]
        spec = WorkerSpec(
            _SERVER,
            None,
            None,
            WorkerOptions(0, num_threads=torch.get_num_threads()),
            builds_policy=factory is not None,
            hides_gpus=settings.device == CPU,
            maker=partial(PolicyWorker, settings=settings, slots=slots, bell=bell),
            role="policy server",
        )
        (source,) = parse.pickled_policies([factory or given["policy"]], factory is not None)
        plan = WorkerPlan(spec, source, {})
        return cls(
            given,
            clients,
            copy=lambda: source if factory is None else pickled("policy_factory", _Built(factory)),
            place=lambda method: partial(InPolicyProcess, plan, ProcessEngine(method)),
        )


class _Built:
    """Becomes the policy of a factory where it is unpickled."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory

    def __reduce__(self) -> tuple[Any, ...]:
        return check.built_policy, (self._factory,)


def _one_device(given: Mapping[str, Any], workers: int) -> Any:
    """Return the device on which the policy is called; None for the policy's own device."""
    each = parse.of_each_worker({name: given[name] for name in parse.ONE_EACH}, workers)
    devices = [check_devices(arguments).policy_device for arguments in each]
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


def _with_wait_defaults(
    options: InferenceOptions, given: Mapping[str, Any], sync: bool
) -> InferenceOptions:
    """Return the options with defaults for how long a policy call waits for more requests.

    Workers of a sync batch wait for each other anyway, so a call waits for all of them, unless
    stragglers are stopped. In an async collector, a call waits while this saves time in total.
    """
    least, timeout = options.min_batch_size, options.server_timeout
    if not sync and least is None:
        return replace(options, min_batch_size=1)
    if sync and given["preemptive_threshold"] is None:
        return options
    return replace(options, server_timeout=_TIMEOUT if timeout is None else timeout)

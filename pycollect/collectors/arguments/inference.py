"""Central inference: what goes with it, and what is made of the arguments then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pycollect import checks as check
from pycollect._core import Bell
from pycollect.arguments import checked
from pycollect.collectors.arguments import workers as parse
from pycollect.collectors.arguments.devices import check_devices
from pycollect.collectors.arguments.given import Given
from pycollect.inference.options import InferenceOptions
from pycollect.policy import build

if TYPE_CHECKING:  # imported once it is asked for
    from pycollect.inference.bell import ServingBell
    from pycollect.inference.server import InferenceServer

_TIMEOUT = 0.01  # seconds, as TorchRL's


@dataclass(frozen=True)
class Central:
    """A policy that is called in this process, for all workers of a collector.

    Attributes:
        given: the arguments, with the policy that a factory built in its place.
        server: calls it.
        bell: on which this process waits for workers, and serves them.
    """

    given: Given
    server: InferenceServer
    bell: ServingBell

    @classmethod
    def of(cls, given: Given, workers: int, *, sync: bool) -> Central | None:
        """Check what was given; None where workers call the policy.

        Raises:
            ValueError: what it cannot be combined with, by the name of the argument.
        """
        options = checked(InferenceOptions, given)
        if not options.central:
            return None
        device = _one_device(given, workers)
        factory = _one_factory(given)
        check.check_factory(factory, given["policy"])
        policy = given["policy"] if factory is None else build(factory)
        check.check_policy(policy)
        if policy is None:
            raise ValueError(
                "inference: expected None without a policy, as random actions are drawn by the "
                "workers, got 'central'"
            )
        from pycollect.inference.bell import ServingBell
        from pycollect.inference.server import InferenceServer

        bell = Bell()
        server = InferenceServer(
            _patient(options, given, sync),
            policy,
            device,
            check.check_exploration("exploration_type", given["exploration_type"]),
            bell.address,
            workers,
            is_ours=factory is not None,
        )
        own = given.instead(policy=policy, policy_factory=None)
        return cls(own, server, ServingBell(bell, server))


def _one_device(given: Mapping[str, Any], workers: int) -> Any:
    """Where the policy is to be called; None: where it lies."""
    each = parse.of_each_worker({name: given[name] for name in parse.ONE_EACH}, workers)
    devices = [check_devices(own).policy_device for own in each]
    if any(device != devices[0] for device in devices):
        raise ValueError(
            "policy_device: expected one for all workers, as inference='central' calls one policy "
            f"for all of them, got {[str(device) for device in devices]}"
        )
    return devices[0]


def _one_factory(given: Mapping[str, Any]) -> Any:
    factory = given["policy_factory"]
    if isinstance(factory, (list, tuple)):
        raise ValueError(
            "policy_factory: expected one for all workers, as inference='central' calls one policy "
            f"for all of them, got {len(factory)}"
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

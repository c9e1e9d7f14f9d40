"""The arguments about weight updates, such as `weight_updater`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pycollect.arguments import argument, check_flag
from pycollect.driver.options import StreamOptions
from pycollect.errors import warn_user

# Schemes of TorchRL that only choose a transport.
_SCHEMES = (
    "SharedMemWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "RayWeightSyncScheme",
    "RPCWeightSyncScheme",
    "DistributedWeightSyncScheme",
)
_POLICY = "policy"
OTHER_MODELS = (
    "other models are not sent to workers. Update models in this process directly, and models of "
    "an environment in pre_collect_hook"
)


def check_schemes(name: str, value: Any) -> dict[str, Any]:
    """Return TorchRL's weight synchronization schemes by model."""
    if not isinstance(value, Mapping | None):
        raise TypeError(f"{name}: expected a dict of schemes by model, got {type(value).__name__}")
    schemes = dict(value or {})
    for model, scheme in schemes.items():
        if not _is_torchrls(scheme, "WeightSyncScheme"):
            raise TypeError(
                f"{name}: expected a WeightSyncScheme for {model!r}, got {type(scheme).__name__}"
            )
    return schemes


def _check_updater(name: str, updater: Any, schemes: Any) -> Any:
    if updater is not None and schemes is not None:
        raise TypeError(f"{name}: expected None because weight_sync_schemes is given; pass one")
    if updater is not None and not callable(updater):
        raise TypeError(
            f"{name}: expected a WeightUpdaterBase or a callable that returns one, got "
            f"{type(updater).__name__}"
        )
    return updater


def _sends(name: str, schemes: Any) -> bool:
    """Check the schemes; return False if the policy has a NoWeightSyncScheme."""
    scheme = _policy_scheme(check_schemes(name, schemes))
    return scheme is None or not _is_torchrls(scheme, "NoWeightSyncScheme")


def _tracker(name: str, value: Any) -> Any:
    if callable(getattr(value, "increment_version", None)):
        return value
    check_flag(name, value)
    return None


def _policy_scheme(schemes: Mapping[str, Any]) -> Any:
    others = [model for model in schemes if model != _POLICY]
    if others:
        raise ValueError(
            f"weight_sync_schemes: expected the only key 'policy', got {others}; {OTHER_MODELS}"
        )
    scheme = schemes.get(_POLICY)
    if scheme is None or _is_torchrls(scheme, "NoWeightSyncScheme"):
        return scheme
    kind = type(scheme)
    if kind.__name__ not in _SCHEMES or not kind.__module__.startswith("torchrl.weight_update"):
        raise ValueError(
            f"weight_sync_schemes: expected one of {', '.join(_SCHEMES)} or NoWeightSyncScheme, "
            f"got {kind.__name__}, whose methods would not be called; use weight_updater, or pass "
            "weights to update_policy_weights_()"
        )
    warn_user(
        f"weight_sync_schemes: {kind.__name__} has no effect; the collector itself chooses how "
        "weights are sent"
    )
    return scheme


def _torchrls(value: Any, name: str) -> Any:
    """Return the base class of that name in TorchRL, or None. TorchRL is not imported."""
    for base in type(value).__mro__:
        if base.__name__ == name and base.__module__.partition(".")[0] == "torchrl":
            return base
    return None


def _is_torchrls(value: Any, name: str) -> bool:
    return _torchrls(value, name) is not None


@dataclass(frozen=True)
class WeightOptions:
    """The arguments about weight updates.

    Attributes:
        updater: The user's weight updater, or a callable that returns it, or None.
        sends: Whether an update changes weights; False with a NoWeightSyncScheme.
        receivers: Schemes that receive weights from other processes, by model.
        tracker: Object that counts policy versions too, such as TorchRL's PolicyVersion, or None.
        worker_idx: Number of this collector among the receivers of a scheme.
    """

    updater: Any = argument(
        None,
        _check_updater,
        """A WeightUpdaterBase of TorchRL, or a callable that returns one. Each weight update
        calls it instead of sending the weights itself.""",
        name="weight_updater",
        also=("weight_sync_schemes",),
    )
    sends: bool = argument(
        None,
        _sends,
        """Weight sync schemes of TorchRL, by model; only "policy" is allowed. With
        NoWeightSyncScheme, updates change no weights. Other schemes have no effect, with a
        warning.""",
        name="weight_sync_schemes",
        accepts="Mapping[str, Any] | None",
    )
    receivers: Mapping[str, Any] = argument(
        None,
        check_schemes,
        """Weight sync schemes of TorchRL, by model, that receive weights from senders in other
        processes.""",
        name="weight_recv_schemes",
        accepts="Mapping[str, Any] | None",
    )
    tracker: Any = argument(
        False,
        _tracker,
        """Record ("collector", "policy_version"). TorchRL's PolicyVersion is also accepted, and
        is incremented with each weight update.""",
        name="track_policy_version",
        accepts="bool",
    )
    worker_idx: int | None = argument(None, lambda _, value: value)

    def stream(self, options: StreamOptions) -> StreamOptions:
        """Return the stream's options with `sends` and `tracker` added."""
        return replace(options, sends=self.sends, tracker=self.tracker)


def end_receiver(scheme: Any) -> None:
    """End the thread of a receiver; the base class's `shutdown` does nothing else."""
    _torchrls(scheme, "WeightSyncScheme").shutdown(scheme)


def only_carries(updater: Any) -> bool:
    """Return whether an updater is one of TorchRL's that only reach TorchRL's own workers."""
    method = getattr(type(updater), "_sync_weights_with_worker", None)
    return getattr(method, "__module__", "").partition(".")[0] == "torchrl"


def made_updater(value: Any) -> Any:
    """Return the updater, or the updater that a callable returns."""
    if isinstance(value, type) or not hasattr(value, "register_collector"):
        value = value()
        if not hasattr(value, "register_collector"):
            raise TypeError(
                "weight_updater: expected a callable that returns a WeightUpdaterBase, got one "
                f"that returned {type(value).__name__}"
            )
    return value


def carried(updater: Any, given: Any) -> Any:
    """Return the weights that an updater of TorchRL would send: the passed ones, or its own."""
    # The RayWeightUpdater's own weights would be a reference.
    if given is None and not _is_torchrls(updater, "RayWeightUpdater"):
        given = updater._get_server_weights()
    return given

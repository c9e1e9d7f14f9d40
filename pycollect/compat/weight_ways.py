"""How the policy comes by new weights: `weight_sync_schemes`, `weight_updater` and their kin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pycollect.arguments import asked, made_of
from pycollect.errors import warn_user
from pycollect.stream.options import StreamOptions

# TorchRL's that only say what carries the weights.
_SCHEMES = (
    "SharedMemWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "RayWeightSyncScheme",
    "RPCWeightSyncScheme",
    "DistributedWeightSyncScheme",
)
_POLICY = "policy"


@dataclass(frozen=True)
class WeightWays:
    """What a collector was told of its policy's weights.

    Attributes:
        sends: whether an update changes weights; False for a NoWeightSyncScheme.
        updater: the user's own, or what makes it.
        receivers: schemes that bring weights from elsewhere, by the model that they are of.
        tracker: counts versions beside the collector, as TorchRL's PolicyVersion does.
        worker_idx: the collector's own number, by which receivers find what is meant for it.
    """

    sends: bool = True
    updater: Any = None
    receivers: Mapping[str, Any] = field(default_factory=dict)
    tracker: Any = None
    worker_idx: int | None = None

    @classmethod
    def checked(
        cls,
        weight_updater: Any,
        weight_sync_schemes: Any,
        weight_recv_schemes: Any,
        track_policy_version: Any,
        worker_idx: Any,
    ) -> WeightWays:
        """Check each argument, and warn about values that have no effect."""
        if weight_updater is not None and weight_sync_schemes is not None:
            raise TypeError(
                "weight_updater: expected None because weight_sync_schemes is given; pass one"
            )
        if weight_updater is not None and not callable(weight_updater):
            raise TypeError(
                "weight_updater: expected a WeightUpdaterBase or a callable that returns one, got "
                f"{type(weight_updater).__name__}"
            )
        scheme = _policy_scheme(check_schemes("weight_sync_schemes", weight_sync_schemes))
        tracked = callable(getattr(track_policy_version, "increment_version", None))
        return cls(
            sends=scheme is None or not _is_torchrls(scheme, "NoWeightSyncScheme"),
            updater=weight_updater,
            receivers=check_schemes("weight_recv_schemes", weight_recv_schemes),
            tracker=track_policy_version if tracked else None,
            worker_idx=worker_idx,
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


def _policy_scheme(schemes: Mapping[str, Any]) -> Any:
    """Return the scheme of the policy, or None."""
    others = [model for model in schemes if model != _POLICY]
    if others:
        raise ValueError(
            f"weight_sync_schemes: expected the only key 'policy', got {others}; other models are "
            "not sent to workers. Update models in this process directly, and those of an "
            "environment in pre_collect_hook"
        )
    scheme = schemes.get(_POLICY)
    if scheme is None or _is_torchrls(scheme, "NoWeightSyncScheme"):
        return scheme
    own = type(scheme)
    if own.__name__ not in _SCHEMES or not own.__module__.startswith("torchrl.weight_update"):
        raise ValueError(
            f"weight_sync_schemes: expected one of {', '.join(_SCHEMES)} or NoWeightSyncScheme, "
            f"got {own.__name__}, whose methods would not be called; use weight_updater, or pass "
            "weights to update_policy_weights_()"
        )
    warn_user(
        f"weight_sync_schemes: {own.__name__} has no effect; the collector itself chooses how "
        "weights are sent"
    )
    return scheme


def _torchrls(value: Any, name: str) -> Any:
    """TorchRL's class of that name, of which it is; None: it is of none. Nothing is imported."""
    for base in type(value).__mro__:
        if base.__name__ == name and base.__module__.partition(".")[0] == "torchrl":
            return base
    return None


def _is_torchrls(value: Any, name: str) -> bool:
    return _torchrls(value, name) is not None


def end_receiver(scheme: Any) -> None:
    """End the thread that receives, by the base class's `shutdown`, which does nothing else."""
    _torchrls(scheme, "WeightSyncScheme").shutdown(scheme)


def only_carries(updater: Any) -> bool:
    """Whether an updater is one of TorchRL's that reach its own workers, and no others."""
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
    """What such an updater would bring to workers: its own weights where none were given."""
    if given is None and not _is_torchrls(updater, "RayWeightUpdater"):  # which gives a reference
        given = updater._get_server_weights()
    return given


@dataclass(frozen=True)
class WeightOptions:
    """The arguments that say how the policy gets new weights."""

    ways: WeightWays = made_of(
        WeightWays.checked,
        weight_updater=asked(
            None,
            """A WeightUpdaterBase of TorchRL, or a callable that returns one. Each weight update
            calls it instead of sending the weights itself.""",
        ),
        weight_sync_schemes=asked(
            None,
            """Weight sync schemes of TorchRL, by model; only "policy" is allowed. With
            NoWeightSyncScheme, updates change no weights. Other schemes have no effect, with a
            warning.""",
            accepts="Mapping[str, Any] | None",
        ),
        weight_recv_schemes=asked(
            None,
            """Weight sync schemes of TorchRL, by model, that receive weights from senders in other
            processes.""",
            accepts="Mapping[str, Any] | None",
        ),
        track_policy_version=asked(
            False,
            """Record ("collector", "policy_version"). TorchRL's PolicyVersion is also accepted, and
            is incremented with each weight update.""",
            accepts="bool",
        ),
        worker_idx=asked(None),
    )

    def stream(self, options: StreamOptions) -> StreamOptions:
        """Return options of a stream with what it has to know of this."""
        return replace(options, sends=self.ways.sends, tracker=self.ways.tracker)

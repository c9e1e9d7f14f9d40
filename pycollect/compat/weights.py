"""Methods by which the policy's weights are updated, including TorchRL's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycollect.compat.weight_options import (
    OTHER_MODELS,
    WeightOptions,
    carried,
    made_updater,
    only_carries,
)
from pycollect.driver.flow import Flow
from pycollect.driver.pace import Pacing
from pycollect.driver.stream import Source

_POLICY = "policy"
_UPDATED = (None, "updated")


class WeightUpdates:
    """Weight updates of a collector, which its source passes on to the workers."""

    _flow: Flow
    _source: Source
    _pace: Pacing
    worker_idx: Any

    def __init__(self, options: WeightOptions) -> None:
        self._weight_options = options
        self._worker_idx = options.worker_idx
        self._updater: Any = None
        self._receivers: dict[str, Any] = {}

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        policy_weights: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        wait: bool = False,
        **others: Any,
    ) -> None:
        """Send new weights to the workers, which use them from their next rollout on.

        An in-process collector calls the live policy, so without weights the call only counts a
        version. If that policy is a copy on another device, the copy is updated at once. If another
        thread makes the call during a rollout in this process, the next step already uses the new
        weights, but all frames of the rollout keep the policy version of its start. If workers are
        in other processes, the call returns at once, also while rollouts run; a queued rollout uses
        the new weights when it starts.

        Args:
            policy_or_weights: An nn.Module, a TensorDict of parameters (nested, as
                ``TensorDict.from_module`` makes it, or flat), a state dict or nested dicts. Names
                and shapes must match the collector's policy; parameters that are missing keep their
                values. A module also brings its extra state and the training mode of each
                submodule; a state dict brings its extra state. A dict by worker id gives workers
                different weights. Defaults to ``None``: the current weights of the policy that the
                collector was made with.
            weights, policy, policy_weights: TorchRL's other names for `policy_or_weights` (default:
                ``None``).
            worker_ids: Id or ids of the workers to update. Defaults to ``None``: all workers. With
                `max_policy_lag`, updates go to all workers.
            model_id: "policy" or ``None``; a collector has no other model (default: ``None``).
            weights_dict: ``{"policy": weights}``. Replaces `policy_or_weights` and `model_id`
                (default: ``None``).
            wait: Return only after all workers have the new weights (default: ``False``).
            others: Further arguments of the `weight_updater`, if there is one.

        Raises:
            ValueError: Names or shapes differ, a worker id or model is unknown, or arguments
                exclude each other.
            TypeError: `policy_or_weights` has another type, or contains extra state that cannot be
                pickled.
        """
        self._flow.moving.check_own_process()
        given = {
            "policy_or_weights": policy_or_weights,
            "weights": weights,
            "policy": policy,
            "policy_weights": policy_weights,
        }
        place, updater = self._source.place, self._updater
        if updater is not None:
            for name, value in (("model_id", model_id), ("weights_dict", weights_dict)):
                if value is not None:
                    raise ValueError(
                        f"{name}: expected None because the collector has a weight_updater"
                    )
            source = source_of(given, None, None)
            if self._source.is_remote and only_carries(updater):  # it only selects the weights
                place.update(carried(updater, source), worker_ids, False)
                updater._call_post_hooks()
            else:
                with place.one_version():
                    updater(policy_or_weights=source, worker_ids=worker_ids, **others)
        elif others:
            name = next(iter(others))
            raise TypeError(f"{name}: not an argument of update_policy_weights_()")
        else:
            place.update(source_of(given, model_id, weights_dict), worker_ids, wait)
        self._pace.count_update()

    def _push_weights(self, workers: Sequence[int]) -> None:
        """Send the policy's weights to workers that are due for an automatic update."""
        if self._updater is None:
            self._source.place.push(workers)
        else:
            everyone = len(workers) == len(self._source.policy_lag)
            self.update_policy_weights_(worker_ids=None if everyone else workers)

    @property
    def weight_updater(self) -> Any:
        """Object that `update_policy_weights_` calls instead of sending weights, or ``None``.

        A WeightUpdaterBase of TorchRL, or a callable that returns one. When it is set, its
        `register_collector` is called. For each update it is called with `policy_or_weights` and
        `worker_ids`.
        """
        return self._updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        if value is not None:
            value = made_updater(value)
            value.register_collector(self)
            if value.collector is not self:
                raise RuntimeError(
                    "weight_updater: expected its attribute `collector` to be the collector passed "
                    f"to register_collector(), got {value.collector!r}"
                )
        self._updater = value

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call the `init` of the `weight_updater`, if there is one.

        Args:
            args, kwargs: Passed to `init` unchanged.
        """
        if self._updater is not None:
            self._updater.init(*args, **kwargs)

    def register_scheme_receiver(
        self, weight_recv_schemes: Mapping[str, Any], *, synchronize_weights: bool = True
    ) -> None:
        """Receive weights through TorchRL's weight sync schemes.

        Each scheme finds its model as an attribute of the collector ("policy"), and writes into it
        in a thread of its own. Weights that it receives for the policy are also sent to the
        workers.

        Args:
            weight_recv_schemes: Schemes by model.
            synchronize_weights: Connect the schemes now, which waits for the senders (default:
                ``True``).
        """
        for model, scheme in weight_recv_schemes.items():
            before = self._receivers.get(model)
            if before is not None and before is not scheme:
                before.shutdown()
            if not scheme.initialized_on_receiver:
                scheme.init_on_receiver(model_id=model, context=self, worker_idx=self.worker_idx)
            self._receivers[model] = scheme
        if synchronize_weights:
            for scheme in weight_recv_schemes.values():
                if not scheme.synchronized_on_receiver:
                    scheme.connect(worker_idx=self.worker_idx)

    def receive_weights(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None
    ) -> None:
        """Take weights as if a sender had sent them, bypassing the `weight_updater`.

        Args:
            policy_or_weights: Weights in any form that `update_policy_weights_` accepts. Defaults
                to ``None``: the weights that the schemes of `weight_recv_schemes` have received.
            weights, policy: Other names for `policy_or_weights` (default: ``None``).

        Raises:
            ValueError: Names or shapes differ, or weights were passed although schemes receive
                them.
        """
        self._flow.moving.check_own_process()
        given = {"policy_or_weights": policy_or_weights, "weights": weights, "policy": policy}
        source = source_of(given, None, None)
        if self._receivers:
            if source is not None:
                raise ValueError(
                    "policy_or_weights: expected None because weight_recv_schemes is given"
                )
            for scheme in self._receivers.values():
                scheme.receive()
        elif source is not None:
            self._source.place.receive(source)

    def increment_version(self) -> None:
        """Increment `policy_version` without new weights; workers see it from their next update.

        Raises:
            RuntimeError: The collector has a `max_policy_lag` and workers in other processes, which
                would not reach the new version.
        """
        if self._source.is_remote and self._flow.options.max_policy_lag is not None:
            raise RuntimeError(
                "max_policy_lag: expected None for increment_version(), which gives workers no new "
                "weights; call update_policy_weights_() instead"
            )
        self._flow.version.count()


def source_of(given: Mapping[str, Any], model_id: Any, weights_dict: Any) -> Any:
    """Return the weights of an update; None means the collector's policy.

    At most one of the arguments `given` by name may be set, and none together with `weights_dict`.
    """
    several = {name: value for name, value in given.items() if value is not None}
    if weights_dict is not None:
        if not isinstance(weights_dict, Mapping):
            raise TypeError(f"weights_dict: expected a dict, got {type(weights_dict).__name__}")
        if model_id is not None or several:
            others = [*several, *(["model_id"] if model_id is not None else [])]
            raise ValueError(
                f"weights_dict: expected None because of {', '.join(others)}; pass one"
            )
        if list(weights_dict) != [_POLICY]:
            raise ValueError(
                f"weights_dict: expected the only key 'policy', got {list(weights_dict)}; "
                f"{OTHER_MODELS}"
            )
        return weights_dict[_POLICY]
    if model_id not in (None, _POLICY):
        raise ValueError(f"model_id: expected 'policy', got {model_id!r}; {OTHER_MODELS}")
    if len(several) > 1:
        raise ValueError(
            f"{list(several)[-1]}: expected None because {next(iter(several))} is given; pass one"
        )
    return next(iter(several.values()), None)


class WorkerPipe:
    """Sends weights to one worker: ``send((weights, "update"))``, which `recv` acknowledges.

    Args:
        give: Sends weights to the worker, in any form that `update_policy_weights_` accepts.
    """

    def __init__(self, give: Callable[[Any], None]) -> None:
        self._give = give
        self._answers: deque[tuple[None, str]] = deque()

    def send(self, message: tuple[Any, str]) -> None:
        """Send weights for the next rollout; raise ValueError for any other message."""
        if not isinstance(message, tuple) or len(message) != 2 or message[1] != "update":
            raise ValueError(f"message: expected (weights, 'update'), got {message!r}")
        self._give(message[0])
        self._answers.append(_UPDATED)

    def recv(self) -> tuple[None, str]:
        """Return ``(None, "updated")`` for each message; raise EOFError if nothing was sent."""
        if not self._answers:
            raise EOFError("no message to acknowledge; call send() first")
        return self._answers.popleft()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether there is an answer, without waiting for one."""
        return bool(self._answers)

"""New weights of the policy: who gives them to a collector, by which of TorchRL's ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollect.stream.flow import Flow
from pycollect.stream.source import Source
from pycollect.stream.weight_calls import source_of
from pycollect.stream.weight_ways import carried, end_receiver, made_updater, only_carries


class WeightUpdates:
    """What a collector is told of new weights, which its source gives to whoever collects."""

    _flow: Flow
    _source: Source
    worker_idx: Any

    def __init__(self) -> None:
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
        """Give workers new weights, which they take when they start their next rollout.

        In this process the policy is live: without weights the call only counts a version, unless
        the policy is called on another device than the caller's lies on; that copy gets them now.
        Elsewhere it returns at once, also while rollouts run; a rollout that is queued already
        takes the new weights when it starts.

        Args:
            policy_or_weights: An nn.Module, a TensorDict of parameters (nested, as
                ``TensorDict.from_module`` makes it, or flat), a state dict or nested dicts, with
                names and shapes of the collector's policy; missing names keep their values. A
                module also brings its extra state and the training mode of each submodule; a state
                dict brings its extra state. Or a dict of these by worker id. Defaults to ``None``:
                the policy that the collector was made with.
            weights, policy, policy_weights: the same under TorchRL's other names.
            worker_ids: one id or several; None: all workers.
            model_id: "policy" or None: there are no others.
            weights_dict: ``{"policy": weights}``, instead of both.
            wait: return only when all have got them.
            others: what the `weight_updater` takes beside, if there is one.

        Raises:
            ValueError: names or shapes differ, a worker id or a model is unknown, or arguments
                exclude each other.
            TypeError: `policy_or_weights` is none of these, or contains an extra state that cannot
                be pickled.
        """
        self._flow.moving.check_here()
        given = {
            "policy_or_weights": policy_or_weights,
            "weights": weights,
            "policy": policy,
            "policy_weights": policy_weights,
        }
        if self._updater is not None:
            for name, value in (("model_id", model_id), ("weights_dict", weights_dict)):
                if value is not None:
                    raise ValueError(f"{name}: expected None where there is a weight_updater")
            self._update_by(self._updater, source_of(given, None, None), worker_ids, others)
        elif others:
            name = next(iter(others))
            raise TypeError(f"{name}: not an argument of update_policy_weights_()")
        else:
            source = source_of(given, model_id, weights_dict)
            self._source.weights.update(source, worker_ids, wait)

    def _update_by(
        self,
        updater: Any,
        source: Any,
        worker_ids: int | Sequence[int] | None,
        others: Mapping[str, Any],
    ) -> None:
        """Let an updater of the user's give the workers their weights.

        One of TorchRL's that would reach workers of its own only says which weights.
        """
        if self._source.elsewhere and only_carries(updater):
            self._source.weights.update(carried(updater, source), worker_ids, False)
            updater._call_post_hooks()
            return
        with self._source.weights.one_version():
            updater(policy_or_weights=source, worker_ids=worker_ids, **others)

    def _give_due_weights(self) -> None:
        """Workers get the policy's weights without being told, where that was asked for."""
        due = self._source.weights.due()
        if not due:
            return
        with self._flow.statistics.timed("transport"):
            if self._updater is None:
                self._source.weights.push(due)
            else:
                everyone = len(due) == len(self._source.policy_lag)
                self.update_policy_weights_(worker_ids=None if everyone else due)

    @property
    def weight_updater(self) -> Any:
        """What `update_policy_weights_` calls instead of giving the weights itself; None: nothing.

        A WeightUpdaterBase of TorchRL's, or a callable that makes one. It is called as there:
        `register_collector` when it is set, then, for each update, itself with
        `policy_or_weights` and `worker_ids`.
        """
        return self._updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        if value is not None:
            value = made_updater(value)
            value.register_collector(self)
            if value.collector is not self:
                raise RuntimeError(
                    "weight_updater: expected one whose `collector` is the one it was registered "
                    f"with, got {value.collector!r}"
                )
        self._updater = value

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call the `init` of the `weight_updater`, if there is one.

        Args:
            args, kwargs: handed on as they are.
        """
        if self._updater is not None:
            self._updater.init(*args, **kwargs)

    def register_scheme_receiver(
        self, weight_recv_schemes: Mapping[str, Any], *, synchronize_weights: bool = True
    ) -> None:
        """Let schemes of TorchRL's bring weights from their senders elsewhere.

        Each finds its model as an attribute of the collector ("policy"), and writes into it in a
        thread of its own; what it brings for the policy is given to the workers, too.

        Args:
            weight_recv_schemes: by model.
            synchronize_weights: connect them now, which waits for the sender.
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
        """Take weights as if a sender had brought them: past the `weight_updater`.

        Args:
            policy_or_weights: as `update_policy_weights_` takes them. None: what the schemes of
                `weight_recv_schemes` have received.
            weights, policy: the same under other names.

        Raises:
            ValueError: names or shapes differ; or weights, where schemes bring them.
        """
        self._flow.moving.check_here()
        given = {"policy_or_weights": policy_or_weights, "weights": weights, "policy": policy}
        source = source_of(given, None, None)
        if self._receivers:
            if source is not None:
                raise ValueError("policy_or_weights: expected None with weight_recv_schemes")
            for scheme in self._receivers.values():
                scheme.receive()
        elif source is not None:
            self._source.weights.receive(source)

    def _stop_receiving(self) -> None:
        """End the threads of the schemes that receive.

        Their queues are the sender's: a scheme's own `shutdown` would stop all of its receivers.
        """
        for scheme in self._receivers.values():
            end_receiver(scheme)

    def increment_version(self) -> None:
        """One more `policy_version`, without weights; workers elsewhere learn it with the next."""
        self._flow.version.count()

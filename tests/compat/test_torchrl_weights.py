"""Weight updates in every form, from TorchRL's schemes and updaters, with both collectors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from raising import refused, warned
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import nn

import pycollect

pytest.importorskip("torchrl")

from torchrl.collectors import (
    Collector,
    MultiSyncCollector,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from torchrl.envs import GymEnv
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*WeightUpdaterBase:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.policy_weights. is deprecated:DeprecationWarning"),
]


class Sum(nn.Module):
    """Sum a parameter, 10 times a buffer, and 100 times one outside the state dict."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.full((1,), value))
        self.register_buffer("kept", torch.full((1,), value))
        self.register_buffer("lost", torch.full((1,), value), persistent=False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        total = self.param + 10 * self.kept + 100 * self.lost
        return total.expand(*observation.shape[:-1], 1)


def policy(value: float = 0.0) -> TensorDictModule:
    return TensorDictModule(Sum(value), ["observation"], ["action"])


def weights(value: float = 1.0) -> TensorDict:
    return TensorDict.from_module(policy(value)).data


def nested(**named: torch.Tensor) -> TensorDict:
    return TensorDict({"module": named})


Update = Callable[[Any], Any]
# Every form that TorchRL supports in process, or with several workers.
FORMS: dict[str, Update] = {
    "nothing": lambda c: c.update_policy_weights_(),
    "from_module": lambda c: c.update_policy_weights_(TensorDict.from_module(policy(1.0))),
    "data": lambda c: c.update_policy_weights_(weights()),
    "as_module": lambda c: c.update_policy_weights_(
        TensorDict.from_module(policy(1.0), as_module=True)
    ),
    "TensorDictParams": lambda c: c.update_policy_weights_(TensorDictParams(weights())),
    "by position, named policy": lambda c: c.update_policy_weights_(weights(), model_id="policy"),
    "weights=": lambda c: c.update_policy_weights_(weights=weights()),
    "weights=, named policy": lambda c: c.update_policy_weights_(
        weights=weights(), model_id="policy"
    ),
    "policy_weights=": lambda c: c.update_policy_weights_(policy_weights=weights()),
    "one worker": lambda c: c.update_policy_weights_(weights(), worker_ids=0),
    "a list of workers": lambda c: c.update_policy_weights_(weights(), worker_ids=[0]),
    "one name": lambda c: c.update_policy_weights_(nested(param=torch.ones(1))),
    "two names, in turn": lambda c: [
        c.update_policy_weights_(nested(**{name: torch.full((1,), 2.0)}))
        for name in ("kept", "lost")
    ],
    "another dtype": lambda c: c.update_policy_weights_(weights().double()),
    "received": lambda c: c.receive_weights(weights()),
    "received from a state dict": lambda c: c.receive_weights(policy(1.0).state_dict()),
    "received from a module": lambda c: c.receive_weights(policy(1.0)),
    "received by name": lambda c: c.receive_weights(policy=policy(1.0)),
    "received, nothing": lambda c: c.receive_weights(),
    "no updater": lambda c: c.init_updater(1, more=2),
}
ONLY_WITH_WORKERS: dict[str, Update] = {
    "a module": lambda c: c.update_policy_weights_(policy(1.0)),
    "policy=": lambda c: c.update_policy_weights_(policy=policy(1.0)),
    "weights_dict": lambda c: c.update_policy_weights_(weights_dict={"policy": weights()}),
}
# In TorchRL, errors in process or silently ignored; the weights do not change.
ERRORS: dict[str, Update] = {
    "unknown names": lambda c: c.update_policy_weights_(nested(other=torch.ones(1))),
    "another shape": lambda c: c.update_policy_weights_(nested(param=torch.ones(2))),
    "another model": lambda c: c.update_policy_weights_(weights(), model_id="value"),
    "by name, by position": lambda c: c.update_policy_weights_(weights(), weights=weights()),
    "policy and position": lambda c: c.update_policy_weights_(weights(), policy=policy()),
    "both names": lambda c: c.update_policy_weights_(weights=weights(), policy=policy()),
    "dict and position": lambda c: c.update_policy_weights_(
        weights(), weights_dict={"policy": weights()}
    ),
    "dict and model": lambda c: c.update_policy_weights_(
        weights_dict={"policy": weights()}, model_id="policy"
    ),
    "a number": lambda c: c.update_policy_weights_(3),
    "a list": lambda c: c.update_policy_weights_([policy()]),
    "an empty dict": lambda c: c.update_policy_weights_({}),
}


def pendulum() -> Any:
    return GymEnv("Pendulum-v1")


def in_process(cls: Any, **arguments: Any) -> Any:
    return cls(pendulum(), policy(), frames_per_batch=4, total_frames=400, **arguments)


def acted(collector: Any) -> list[float]:
    """Return the distinct actions of the next batch."""
    actions: list[float] = next(iter(collector))["action"].unique().tolist()
    return actions


@pytest.mark.parametrize("form", FORMS)
def test_forms_in_process(form: str) -> None:
    seen = []
    for cls in (Collector, pycollect.Collector):
        collector = in_process(cls)
        before = acted(collector)
        FORMS[form](collector)
        seen.append((before, acted(collector), collector.policy.module.param.item()))
        collector.shutdown()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("form", ONLY_WITH_WORKERS)
def test_forms_that_torchrl_refuses_in_process(form: str) -> None:
    """TorchRL accepts them with several workers; pycollect always does."""
    collector = in_process(pycollect.Collector)
    ONLY_WITH_WORKERS[form](collector)
    assert acted(collector) == [111.0]
    collector.shutdown()


@pytest.mark.parametrize("form", ERRORS)
def test_errors(form: str) -> None:
    for cls in (Collector, pycollect.Collector):
        collector = in_process(cls)
        with pytest.raises(Exception) as caught:  # noqa: PT011 (theirs are of many kinds)
            ERRORS[form](collector)
        if cls is pycollect.Collector:
            assert isinstance(caught.value, (TypeError, ValueError))
        assert acted(collector) == [0.0]
        collector.shutdown()


def test_weights_that_torchrl_ignores_are_refused() -> None:
    collector = in_process(pycollect.Collector)
    known = torch.ones(1)
    for update in (
        lambda: collector.update_policy_weights_(nested(param=known, other=known)),
        lambda: collector.update_policy_weights_(weights_dict={"value": weights()}),
        lambda: collector.update_policy_weights_(TensorDict()),
        lambda: collector.update_policy_weights_(something=3),
        lambda: collector.update_policy_weights_(weights(), worker_ids=7),
    ):
        with pytest.raises((TypeError, ValueError)):
            update()
    assert acted(collector) == [0.0]
    collector.shutdown()


def test_models_other_than_the_policy_are_refused_with_the_alternative() -> None:
    both = {"policy": None, "postproc.adv_module": None}
    collector = in_process(pycollect.Collector)
    for given in ({"weights_dict": both}, {"model_id": "postproc.adv_module"}):
        (name,) = given
        with pytest.raises(ValueError, match=f"^{name}: .*postproc.adv_module.*pre_collect_hook"):
            collector.update_policy_weights_(**given)
    assert acted(collector) == [0.0]
    collector.shutdown()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("form", [*FORMS, *ONLY_WITH_WORKERS])
def test_forms_with_workers(form: str) -> None:
    if form == "received by name":
        pytest.skip("there, collectors of processes do not take it")
    if form.endswith(("one worker", "list of workers")):
        pytest.skip("there, all workers of one device get them")
    seen = []
    for cls in (MultiSyncCollector, pycollect.MultiSyncCollector):
        collector = cls(
            [pendulum] * 2, policy(), frames_per_batch=8, total_frames=400, cat_results="stack"
        )
        {**FORMS, **ONLY_WITH_WORKERS}[form](collector)
        seen.append(acted(collector))
        collector.shutdown()
    assert seen[0] == seen[1]


@pytest.mark.processes
def test_weights_of_workers_do_not_change_the_callers_policy() -> None:
    """TorchRL writes them into the policy, because it is in the workers' shared memory."""
    own = policy()
    with pycollect.MultiSyncCollector([pendulum] * 2, own, frames_per_batch=8) as collector:
        collector.update_policy_weights_(weights())
        assert acted(collector) == [111.0]
    assert own.module.param == 0.0


class Recording(WeightUpdaterBase):
    """Record the order of method calls, and write weights in this process."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def register_collector(self, collector: Any) -> None:
        self.calls.append("register")
        super().register_collector(collector)

    def _get_server_weights(self) -> Any:
        self.calls.append("server")
        return weights(2.0)

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        self.calls.append("map")
        return policy_or_weights

    def all_worker_ids(self) -> Any:
        self.calls.append("all")
        return None

    def _skip_update(self, worker_id: Any) -> bool:
        self.calls.append(("skip", worker_id))
        return False

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.calls.append(("sync", worker_id))
        TensorDict.from_module(self.collector.policy).data.update_(server_weights)


def test_an_updater_is_called_as_in_torchrl() -> None:
    seen = []
    for cls in (Collector, pycollect.Collector):
        updater = Recording()
        updater.register_post_hook(lambda calls=updater.calls: calls.append("hook"))
        collector = in_process(cls, weight_updater=updater)
        actions = [acted(collector)]
        for update in (
            lambda c: c.update_policy_weights_(),
            lambda c: c.update_policy_weights_(weights()),
            lambda c: c.update_policy_weights_(weights=weights(3.0), worker_ids=[0, 1]),
            lambda c: c.weight_updater.push_weights(weights(4.0)),
        ):
            update(collector)
            actions.append(acted(collector))
        assert collector.weight_updater is updater
        collector.shutdown()
        seen.append((updater.calls, actions))
    assert seen[0] == seen[1]


def test_an_updater_of_torchrls_in_process() -> None:
    seen = []
    for cls in (Collector, pycollect.Collector):
        own = policy()
        updater = VanillaWeightUpdater(
            weight_getter=lambda: weights(2.0), policy_weights=TensorDict.from_module(own).data
        )
        collector = cls(
            pendulum(), own, frames_per_batch=4, total_frames=40, weight_updater=updater
        )
        actions = [acted(collector)]
        collector.update_policy_weights_()
        actions.append(acted(collector))
        collector.update_policy_weights_(weights(3.0))
        seen.append([*actions, acted(collector)])
        collector.shutdown()
    assert seen[0] == seen[1] == [[0.0], [222.0], [333.0]]


SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("given", [True, False])
def test_schemes_in_process(scheme: Any, given: bool) -> None:
    """TorchRL's schemes fail in process, even in TorchRL's own example."""
    with warned("weight_sync_schemes"):
        collector = in_process(pycollect.Collector, weight_sync_schemes={"policy": scheme()})
    collector.policy.module.param.data.fill_(5.0)
    collector.update_policy_weights_(weights() if given else None)
    assert acted(collector) == ([111.0] if given else [5.0])
    collector.shutdown()


def test_a_scheme_that_sends_nothing() -> None:
    seen = []
    for cls in (Collector, pycollect.Collector):
        collector = in_process(cls, weight_sync_schemes={"policy": NoWeightSyncScheme()})
        collector.update_policy_weights_(weights())
        seen.append(acted(collector))
        collector.shutdown()
    assert seen == [[0.0], [0.0]]


def test_a_scheme_of_the_users_own_is_refused() -> None:
    class Own(SharedMemWeightSyncScheme):
        pass

    assert issubclass(Own, WeightSyncScheme)
    with refused(ValueError, "weight_sync_schemes") as caught:
        in_process(pycollect.Collector, weight_sync_schemes={"policy": Own()})
    assert "Own" in str(caught.value)


def sending(scheme: Any) -> None:
    """Initialize the scheme as a sender with one receiver."""
    scheme.init_on_sender(
        model_id="policy", weights=weights(2.0), devices=[torch.device("cpu")], num_workers=1
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_that_receives(scheme: Any) -> None:
    """The policy uses weights of a remote sender, here another thread."""
    seen = []
    for cls in (Collector, pycollect.Collector):
        sender = scheme()
        sending(sender)
        there = threading.Thread(target=sender.connect)
        there.start()
        receivers = {"policy": copy.copy(sender)}
        collector = in_process(cls, weight_recv_schemes=receivers, worker_idx=0)
        there.join()
        assert collector.worker_idx == 0
        actions = [acted(collector)]
        for value in (3.0, 4.0):
            sender.send(weights(value))
            actions.append(acted(collector))
        with pytest.raises(ValueError, match="policy_or_weights"):
            collector.receive_weights(weights())
        collector.shutdown()
        if cls is Collector:  # its thread would wait forever on closed queues
            WeightSyncScheme.shutdown(receivers["policy"])
        sender.shutdown()
        seen.append(actions)
    assert seen[0] == seen[1] == [[222.0], [333.0], [444.0]]


@pytest.mark.parametrize("first", [True, False])
def test_a_policy_version_of_the_users(first: bool) -> None:
    """It increments with each update, and when called directly."""
    seen = []
    for cls in (Collector, pycollect.Collector):
        version = PolicyVersion()
        collector = in_process(cls, track_policy_version=version)
        if first:
            next(iter(collector))
        collector.update_policy_weights_()
        collector.update_policy_weights_(weights())
        collector.increment_version()
        seen.append((version.version, collector.policy_version, collector.get_policy_version()))
        collector.shutdown()
    assert seen[0] == seen[1] == (3, 3, 3)

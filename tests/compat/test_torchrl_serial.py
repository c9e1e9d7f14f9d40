"""SerialEnv: its environments are stepped directly if the frames are the same bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from raising import refused
from tensordict.nn import TensorDictModule
from test_torchrl_gym import GYM, KWARGS, WalkEnv, choices, linear
from torchrl_support import assert_alike, collect, compare

import pycollect
from pycollect.envs.make import make_env_batch

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    FrameSkipTransform,
    GymEnv,
    GymWrapper,
    InitTracker,
    MultiAction,
    NoopResetEnv,
    ObservationNorm,
    ParallelEnv,
    RenameTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    VecNormV2,
)

from pycollect.envs.torchrl.adapter import TorchRLEnv
from pycollect.envs.torchrl.serial import SerialRows, UnwrappedRows

Make = Callable[[], Any]


def pendulum() -> Any:
    return GymEnv("Pendulum-v1")


def cart_pole() -> Any:
    return GymEnv("CartPole-v1")


def serial(make: Make, transforms: Callable[[], Any] | None = None, count: int = 2) -> Any:
    """A SerialEnv of environments that begin in different places."""

    def made() -> Any:
        return make() if transforms is None else TransformedEnv(make(), transforms())

    env = SerialEnv(count, made)
    env.set_seed(7)
    return env


PLAIN = ("Pendulum", "Pendulum on a device", "CartPole", "CartPole index", "nested", "place index")
TRANSFORMS: dict[str, Callable[[], Any]] = {
    "none": Compose,
    "StepCounter": lambda: StepCounter(4),
    "memory": lambda: Compose(
        RewardSum(),
        InitTracker(),
        CatFrames(3, dim=-1, in_keys=["observation"], out_keys=["frames"]),
    ),
    "DoubleToFloat": DoubleToFloat,
    "ObservationNorm": lambda: ObservationNorm(0.5, 2.0, in_keys=["observation"]),
    "RenameTransform": lambda: RenameTransform(["observation"], [("deep", "er")], create_copy=True),
    "TensorDictPrimer": lambda: TensorDictPrimer(hidden=Unbounded(4), default_value=2.0),
    "FrameSkipTransform": lambda: FrameSkipTransform(3),
    "NoopResetEnv": lambda: NoopResetEnv(3),
    "VecNormV2": lambda: VecNormV2(in_keys=["observation"], out_keys=["n"]),
}


def rowwise(make_policy: Callable[[], Any]) -> Callable[[], Any]:
    """Return a policy that computes each row separately."""

    def make() -> Any:
        policy = make_policy()
        key = policy.in_keys[0]

        def act(observation: torch.Tensor) -> torch.Tensor:
            return torch.stack([policy.module(row) for row in observation])

        return TensorDictModule(act, [key], ["action"])

    return make


@pytest.mark.parametrize("kwargs", KWARGS)
@pytest.mark.parametrize("name", PLAIN)
def test_frames_of_plain_environments(name: str, kwargs: dict[str, Any]) -> None:
    make, make_policy = GYM[name]
    if name != "Pendulum":
        make_policy = rowwise(make_policy)
    batch = make_env_batch(serial(make))
    assert type(batch) is UnwrappedRows
    batch.close()
    compare(partial(serial, make), make_policy, frames=60, **kwargs)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_frames_of_transformed_environments(name: str) -> None:
    make = partial(serial, cart_pole, TRANSFORMS[name])
    batch = make_env_batch(make)
    assert type(batch) is SerialRows
    batch.close()
    compare(make, rowwise(choices(2, False, "observation")), frames=40, batches=2)


@pytest.mark.parametrize("kwargs", KWARGS)
@pytest.mark.parametrize("policy", [None, rowwise(choices(2, False, "observation"))])
def test_arguments_of_transformed_environments(policy: Any, kwargs: dict[str, Any]) -> None:
    compare(partial(serial, cart_pole, TRANSFORMS["memory"]), policy, frames=40, **kwargs)


@pytest.mark.parametrize("transforms", [None, TRANSFORMS["memory"]])
def test_frames_equal_those_of_torchrls_step(
    transforms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frames() -> list[Any]:
        make = partial(serial, pendulum, transforms, 3)
        kwargs = {"max_frames_per_traj": 5, "reset_at_each_iter": True, "frames": 21}
        return collect(pycollect.Collector, make, linear(3)(), **kwargs)

    apart = frames()
    monkeypatch.setattr("pycollect.envs.torchrl.split_serial", lambda env: None)
    assert_alike(apart, frames())


def test_the_states_of_a_policy() -> None:
    def remember(observation: torch.Tensor, hidden: torch.Tensor) -> Any:
        action = torch.nn.functional.one_hot((hidden.sum(-1) > 0.1).long(), 2)
        return action, hidden * 0.5 + observation.sum(-1, keepdim=True), hidden.sum(-1)

    make = partial(serial, cart_pole, TRANSFORMS["TensorDictPrimer"])
    keys = ["action", ("next", "hidden"), "extra"]
    compare(make, lambda: TensorDictModule(remember, ["observation", "hidden"], keys), frames=40)


@pytest.mark.parametrize("transforms", [None, TRANSFORMS["memory"]])
@pytest.mark.parametrize("static", [False, True])
def test_seeds(transforms: Any, static: bool) -> None:
    def frames(collector_class: Any) -> list[Any]:
        env = SerialEnv(
            3, lambda: TransformedEnv(pendulum(), transforms()) if transforms else pendulum()
        )
        collector = collector_class(env, linear(3)(), frames_per_batch=60, total_frames=120)
        try:
            collector.set_seed(11, static_seed=static)
            if collector_class is Collector:
                collector.reset()
            return [batch.clone() for batch in collector]
        finally:
            collector.shutdown()

    assert_alike(frames(pycollect.Collector), frames(Collector))


def test_a_list_of_callables_is_a_batch_of_them() -> None:
    batch = make_env_batch([pendulum, pendulum])
    assert type(batch) is UnwrappedRows
    batch.close()

    def make() -> list[Any]:
        return [lambda: GymWrapper(WalkEnv("place")), lambda: GymWrapper(WalkEnv("place"))]

    (ours, *_) = collect(pycollect.Collector, make, rowwise(choices(3, False, "observation"))())
    assert ours.shape == (2, 12)
    assert ours["action"].dtype == torch.int64


@pytest.mark.parametrize("name", ["CartPole", "CartPole index", "nested"])
def test_random_actions_are_encoded(name: str) -> None:
    env = serial(GYM[name][0])
    spec = env.full_action_spec["action"]
    (batch, _) = collect(pycollect.Collector, lambda: env, frames=60, batches=2)
    assert batch["action"].dtype == spec.dtype
    assert all(spec.is_in(action) for action in batch["action"].unbind(1))
    assert not torch.equal(*batch["action"])


class MyReward(RewardSum):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: SerialEnv(2, mock.CountingEnv),
        lambda: SerialEnv(2, lambda: TransformedEnv(pendulum(), MyReward())),
        lambda: SerialEnv(2, lambda: TransformedEnv(cart_pole(), MultiAction())),
        lambda: type("MySerial", (SerialEnv,), {})(2, pendulum),
        lambda: TransformedEnv(SerialEnv(2, pendulum), RewardSum()),
    ],
    ids=["other env", "own transform", "MultiAction", "subclass", "outer transform"],
)
def test_environments_that_torchrl_must_step(make: Make) -> None:
    env = make_env_batch(make)
    assert type(env) is TorchRLEnv
    env.close()


def test_different_environments_are_collected_by_their_specs() -> None:
    """Action bounds are the environment's, so rows are stepped through their wrappers."""

    class Strong(gymnasium.envs.classic_control.PendulumEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = gymnasium.spaces.Box(-3, 3, (1,))

    def make() -> Any:
        env = SerialEnv(2, [pendulum, lambda: GymWrapper(Strong())])
        env.set_seed(7)
        return env

    batch = make_env_batch(make)
    assert type(batch) is SerialRows
    batch.close()
    compare(make, linear(3), frames=40)


class ClosingEnv(WalkEnv):
    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("transforms", [None, RewardSum])
def test_an_instance_that_runs_is_reset_and_closed_with_the_collector(transforms: Any) -> None:
    inner = [ClosingEnv("place"), ClosingEnv("place")]

    def wrapped(env: Any) -> Any:
        wrapper = GymWrapper(env)
        return wrapper if transforms is None else TransformedEnv(wrapper, transforms())

    env = SerialEnv(2, [partial(wrapped, one) for one in inner])
    env.rollout(2)
    before = [one.closed for one in inner]  # the inspection opened and closed it
    collector = pycollect.Collector(env, None, frames_per_batch=4)
    assert (collector.next()["observation"].argmax(-1)[:, 0] == 0).all()
    collector.shutdown()
    collector.shutdown()
    assert env.is_closed
    assert [one.closed for one in inner] == [count + 1 for count in before]


def test_an_instance_that_was_closed_starts_again() -> None:
    env = SerialEnv(2, pendulum)
    env.rollout(2)
    env.close()
    with pycollect.Collector(env, None, frames_per_batch=4) as collector:
        assert collector.next().shape == (2, 2)


def test_environments_with_processes_are_not_taken_apart() -> None:
    """A ParallelEnv is stepped as it is."""
    env = make_env_batch(partial(ParallelEnv, 1, pendulum))
    assert type(env) is TorchRLEnv
    env.close()


def _in_two_places() -> dict[str, Any]:
    inner, own = gymnasium.make("Pendulum-v1"), pendulum()
    return {
        "one": [lambda: own, lambda: own],
        "wrappers of one": [lambda: GymWrapper(inner), lambda: GymWrapper(inner)],
        "transforms of one": [
            lambda: TransformedEnv(own, StepCounter()),
            lambda: TransformedEnv(own, RewardSum()),
        ],
        "serial": lambda: SerialEnv(2, lambda: GymWrapper(inner)),
        "transformed serial": lambda: TransformedEnv(
            SerialEnv(2, lambda: GymWrapper(inner)), RewardSum()
        ),
        "instance": SerialEnv(2, lambda: GymWrapper(inner)),
    }


@pytest.mark.parametrize("kind", _in_two_places())
def test_one_environment_in_two_places(kind: str) -> None:
    with refused(ValueError, "create_env_fn") as caught:
        pycollect.SyncDataCollector(_in_two_places()[kind], None, frames_per_batch=4)
    assert "[0, 1]" in str(caught.value)


def test_a_serial_env_copies_an_environment_that_it_gets_twice() -> None:
    env = pendulum()
    with pycollect.SyncDataCollector(
        SerialEnv(2, lambda: env), None, frames_per_batch=8
    ) as collector:
        td = collector.next()
    assert not torch.equal(td["observation"][0], td["observation"][1])

"""GymEnv and GymWrapper: the env inside is stepped, with the same frames as the wrapper's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from raising import refused
from tensordict.nn import TensorDictModule
from torchrl_support import assert_alike, collect, compare

import pycollect
from pycollect.envs.make import make_env_batch

pytest.importorskip("torchrl")

from torchrl.collectors import Collector
from torchrl.envs import GymEnv, GymWrapper, RewardSum, TransformedEnv, default_info_dict_reader

from pycollect.envs.torchrl.adapter import TorchRLEnv
from pycollect.envs.torchrl.gym import Unwrapped

Make = Callable[[], Any]


class WalkEnv(gymnasium.Env[Any, Any]):
    """Observe a place in every supported form; the episode ends at a random place."""

    def __init__(self, observation: str = "nested") -> None:
        box = spaces.Box(-1, 1, (2, 3), np.float64)
        pixels = spaces.Box(0, 255, (4, 4, 3), np.uint8)
        shown: dict[str, Any] = {
            "nested": spaces.Dict(
                {
                    "z": box,
                    "deep": spaces.Dict({"pixels": pixels, "place": spaces.Discrete(9)}),
                    "bits": spaces.MultiBinary(4),
                }
            ),
            "place": spaces.Discrete(9),
            "tuple": spaces.Tuple((box, box)),
            "many": spaces.MultiDiscrete([3, 4]),
            "text": spaces.Text(9),
        }
        self.observation_space = shown[observation]
        self.action_space = spaces.Discrete(3)
        self.place, self.end = 0, 0

    def _observe(self) -> Any:
        if isinstance(self.observation_space, spaces.Discrete):
            return self.place
        if isinstance(self.observation_space, spaces.Tuple):
            return (np.full((2, 3), self.place / 9), np.zeros((2, 3)))
        if isinstance(self.observation_space, spaces.MultiDiscrete):
            return np.array([self.place % 3, self.place % 4])
        if isinstance(self.observation_space, spaces.Text):
            return "a" * (self.place + 1)
        return {
            "z": np.full((2, 3), self.place / 9),
            "deep": {"pixels": np.full((4, 4, 3), self.place, np.uint8), "place": self.place},
            "bits": np.array([self.place >> i & 1 for i in range(4)], np.int8),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place, self.end = 0, int(self.np_random.integers(3, 8))
        return self._observe(), {"end": np.array([self.end])}

    def step(self, action: Any) -> Any:
        assert action in self.action_space
        self.place = min(self.place + int(action), 8)
        over = self.place >= self.end
        return self._observe(), self.place / 3, over, False, {"end": np.array([self.end])}


def linear(size: int) -> Callable[[], Any]:
    def make_policy() -> Any:
        torch.manual_seed(0)
        return TensorDictModule(torch.nn.Linear(size, 1), ["observation"], ["action"])

    return make_policy


def choices(count: int, index: bool, key: Any) -> Callable[[], Any]:
    """Compute a choice from the sum of the observation."""

    def act(observation: torch.Tensor) -> torch.Tensor:
        choice = (observation.double().sum() * 7).long().abs() % count
        return choice if index else torch.nn.functional.one_hot(choice, count)

    return lambda: TensorDictModule(act, [key], ["action"])


GYM: dict[str, tuple[Make, Callable[[], Any]]] = {
    "Pendulum": (lambda: GymEnv("Pendulum-v1"), linear(3)),
    "Pendulum on a device": (lambda: GymEnv("Pendulum-v1", device="cpu"), linear(3)),
    "Pendulum wrapped": (lambda: GymWrapper(gymnasium.make("Pendulum-v1")), linear(3)),
    "CartPole": (lambda: GymEnv("CartPole-v1"), choices(2, False, "observation")),
    "CartPole index": (
        lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
        choices(2, True, "observation"),
    ),
    "nested": (lambda: GymWrapper(WalkEnv()), choices(3, False, "z")),
    "nested index": (
        lambda: GymWrapper(WalkEnv(), categorical_action_encoding=True),
        choices(3, True, "z"),
    ),
    "place": (lambda: GymWrapper(WalkEnv("place")), choices(3, False, "observation")),
    "place index": (
        lambda: GymWrapper(WalkEnv("place"), categorical_action_encoding=True),
        choices(3, True, "observation"),
    ),
}
KWARGS: list[dict[str, Any]] = [{}, {"max_frames_per_traj": 5}, {"set_truncated": True}]


def seeded(make: Make) -> Make:
    def make_seeded() -> Any:
        env = make()
        env.set_seed(7)
        return env

    return make_seeded


@pytest.mark.parametrize("kwargs", KWARGS)
@pytest.mark.parametrize("name", GYM)
def test_frames(name: str, kwargs: dict[str, Any]) -> None:
    make, make_policy = GYM[name]
    kind = make_env_batch(make)
    assert type(kind) is Unwrapped
    kind.close()
    compare(seeded(make), make_policy, frames=60, **kwargs)


@pytest.mark.parametrize("kwargs", [*KWARGS, {"reset_at_each_iter": True}])
@pytest.mark.parametrize("name", GYM)
def test_frames_equal_those_of_stepping_through_torchrl(
    name: str, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, make_policy = GYM[name]

    def frames() -> list[Any]:
        collector = pycollect.SyncDataCollector(
            make, make_policy(), frames_per_batch=60, total_frames=240, **kwargs
        )
        with collector:
            assert collector.set_seed(3) == collector.set_seed(3)
            return [batch.clone() for batch in collector]

    inside = frames()
    monkeypatch.setattr("pycollect.envs.torchrl.unwrapped", lambda env: None)
    assert_alike(inside, frames())


@pytest.mark.parametrize("name", ["Pendulum", "CartPole", "place index"])
def test_seeds(name: str) -> None:
    """Compare `set_seed`; TorchRL's needs a reset afterwards."""
    make, make_policy = GYM[name]

    def frames(collector_class: Any) -> list[Any]:
        collector = collector_class(make, make_policy(), frames_per_batch=50, total_frames=100)
        try:
            collector.set_seed(11)
            if collector_class is Collector:
                collector.reset()
            return [batch.clone() for batch in collector]
        finally:
            collector.shutdown()

    assert_alike(frames(pycollect.SyncDataCollector), frames(Collector))


@pytest.mark.parametrize("name", GYM)
def test_random_actions_are_encoded(name: str) -> None:
    env = GYM[name][0]()
    spec = env.full_action_spec["action"]
    (batch, _) = collect(pycollect.SyncDataCollector, lambda: env, frames=60, batches=2)
    assert batch["action"].dtype == spec.dtype
    assert batch["action"].shape[1:] == spec.shape
    assert all(spec.is_in(action) for action in batch["action"])
    assert len(batch["action"].unique(dim=0)) > 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: TransformedEnv(GymEnv("Pendulum-v1"), RewardSum()),
        lambda: GymEnv("Pendulum-v1", frame_skip=2),
        lambda: GymEnv("Pendulum-v1", num_envs=2),
        lambda: GymWrapper(WalkEnv("tuple")),
        lambda: GymWrapper(WalkEnv("many")),
        lambda: GymWrapper(WalkEnv("text")),
        lambda: GymWrapper(WalkEnv()).set_info_dict_reader(
            default_info_dict_reader(["end"], spec=[_unbounded()])
        ),
        lambda: type("MyEnv", (GymEnv,), {})("Pendulum-v1"),
    ],
    ids=[
        "transform",
        "frame skip",
        "batched",
        "tuple",
        "MultiDiscrete",
        "text",
        "info",
        "subclass",
    ],
)
def test_not_unwrapped(make: Make) -> None:
    env = make_env_batch(make)
    assert type(env) is TorchRLEnv
    env.close()
    compare(seeded(make), frames=24)


def _unbounded() -> Any:
    from torchrl.data import Unbounded

    return Unbounded((1,), dtype=torch.int64)


def test_replaced_methods_are_called() -> None:
    env = GymEnv("Pendulum-v1")
    env.read_reward = lambda reward: torch.full((1,), 5.0)
    (batch, _) = collect(pycollect.SyncDataCollector, lambda: env, frames=3, batches=2)
    assert batch["next", "reward"].flatten().tolist() == [5.0] * 3


def test_existing_step_counts_are_refused() -> None:
    class Counted(WalkEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Dict({"step_count": spaces.Discrete(3)})

    make_env_batch(lambda: GymWrapper(Counted())).close()
    with refused(ValueError, "max_frames_per_traj") as caught:
        pycollect.SyncDataCollector(
            lambda: GymWrapper(Counted()), None, frames_per_batch=4, max_frames_per_traj=2
        )
    assert "step_count" in str(caught.value)


def test_closing() -> None:
    class Closing(WalkEnv):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    inner = Closing()
    collector = pycollect.SyncDataCollector(GymWrapper(inner), None, frames_per_batch=4)
    collector.shutdown()
    collector.shutdown()
    assert inner.closed == 1

"""`observation_dtype` and `observation_scale`: convert the environment's observations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from collect_support import ASYNC, IN_PROCESS, MULTI_STACK, Way, collecting, marked, parity_policy
from echo_envs import echo_fns
from gymnasium import spaces
from raising import refused
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch.distributions import Categorical

from pycollect import SyncDataCollector
from pycollect.data.cast import _fits, scaled, scaled_at_once


class FramesEnv(gymnasium.Env[Any, Any]):
    """An environment with frames of bytes, a mask, an index and two vectors.

    An episode has three steps.
    """

    def __init__(self, number: int = 0) -> None:
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Dict(
            {
                "frame": spaces.Box(0, 255, (2, 3), np.uint8),
                "allowed": spaces.MultiBinary(2),
                "inner": spaces.Dict({"speed": spaces.Box(-9.0, 9.0, (2,), np.float64)}),
            }
        )
        self.observation_space["inner"]["on"] = spaces.Box(0, 1, (), np.bool_)
        self.number, self.steps = number, 0

    def _observe(self) -> dict[str, Any]:
        frame = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40 + self.steps + self.number
        return {
            "frame": frame,
            "allowed": np.array([1, 0], np.int8),
            "inner": {"speed": np.array([0.1, self.steps]), "on": np.bool_(True)},
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observe(), 1.0, self.steps == 3, False, {}


def frames_entry(worker: int) -> list[Callable[[], FramesEnv]]:
    return [partial(FramesEnv, worker), partial(FramesEnv, worker + 1)]


def plain_and_cast(way: Way, batches: int = 2, **arguments: Any) -> list[tuple[Any, Any]]:
    """Return pairs of the same batches without and with these arguments."""
    results = []
    for own in ({}, arguments):
        with (
            collecting(way, frames_entry, frames=8, prefetch=0, **own)
            if way.remote
            else (collecting(way, frames_entry, frames=8, **own)) as collector
        ):
            collector.set_seed(0)
            results.append([collector.next() for _ in range(batches)])
    return list(zip(*results, strict=True))


@pytest.mark.parametrize("way", marked(IN_PROCESS, MULTI_STACK, ASYNC[0]))
def test_frames_are_cast_and_scaled_at_the_root_and_under_next(way: Way) -> None:
    for plain, cast in plain_and_cast(
        way,
        observation_dtype={"frame": torch.bfloat16, ("inner", "speed"): "float32"},
        observation_scale={"frame": 1 / 255},
    ):
        for at in (lambda td: td, lambda td: td["next"]):
            frames = at(plain)["frame"]
            if way.sync or not way.remote:
                wanted = (frames.to(torch.float32) / 255).to(torch.bfloat16)
                torch.testing.assert_close(at(cast)["frame"], wanted)
            assert at(cast)["frame"].dtype == torch.bfloat16
            assert at(cast)["frame"].shape == frames.shape
            assert at(cast)["inner", "speed"].dtype == torch.float32
            assert at(cast)["allowed"].dtype == torch.int8
        assert cast["next", "reward"].dtype == torch.float32
        assert cast.names == plain.names


def test_one_dtype_for_all_does_not_cast_flags_and_bools() -> None:
    ((plain, cast),) = plain_and_cast(IN_PROCESS, 1, observation_dtype=torch.float16)
    for td in (cast, cast["next"]):
        assert td["frame"].dtype == td["inner", "speed"].dtype == torch.float16
        assert td["allowed"].dtype == torch.float16
        assert td["inner", "on"].dtype == torch.bool
    for key in ("action", ("next", "reward"), ("collector", "traj_ids")):
        assert cast[key].dtype == plain[key].dtype
        assert torch.equal(cast[key], plain[key]) or key == "action"


def test_a_scale_without_a_dtype_casts_only_integers_to_float32() -> None:
    ((plain, cast),) = plain_and_cast(
        IN_PROCESS, 1, observation_scale={"frame": np.float32(0.5), ("inner", "speed"): 2}
    )
    assert torch.equal(cast["frame"], plain["frame"] * 0.5)
    assert cast["frame"].dtype == torch.float32
    assert torch.equal(cast["inner", "speed"], plain["inner", "speed"] * 2)
    assert cast["inner", "speed"].dtype == torch.float64


class Taking(torch.nn.Module):
    """A policy on TensorDicts that also outputs the observation it read."""

    def forward(self, td: Any) -> Any:
        seen = td["observation"]
        return td.update({"action": torch.zeros(seen.shape[:-1], dtype=torch.int64), "seen": seen})


def echo_fn(worker: int) -> Any:
    return echo_fns(worker)[0]


@pytest.mark.parametrize(
    ("way", "entry", "policy"),
    [
        (IN_PROCESS, echo_fns, parity_policy),
        (IN_PROCESS, echo_fn, parity_policy),
        (IN_PROCESS, echo_fns, Taking),
        (MULTI_STACK, echo_fn, Taking),
    ],
)
def test_the_policy_reads_the_delivered_observations(way: Way, policy: Any, entry: Any) -> None:
    asked = {"observation_dtype": torch.float64, "observation_scale": 0.1}
    with collecting(way, entry, policy(), frames=24, **asked) as collector:
        tds = [collector.next() for _ in range(3)]
    for td in tds:
        assert td["observation"].dtype == torch.float64
        assert torch.equal(td["seen"], td["observation"])


def test_a_learner_gets_the_log_probabilities_that_were_recorded() -> None:
    class Pixels(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 255, (12,), np.uint8)
        action_space = gymnasium.spaces.Discrete(3)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            return self.observation_space.sample(), 0.0, False, False, {}

    net = TensorDictModule(torch.nn.Linear(12, 3), ["observation"], ["logits"])
    policy = ProbabilisticTensorDictSequential(
        net,
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )
    cast = {"observation_dtype": torch.float32, "observation_scale": 1 / 255}
    with SyncDataCollector(Pixels, policy, frames_per_batch=16, **cast) as collector:
        td = collector.next()
    again = policy.get_dist(td.select("observation")).log_prob(td["action"])
    torch.testing.assert_close(again, td["action_log_prob"])


def test_whole_trajectories_and_compact_batches_are_cast() -> None:
    with SyncDataCollector(
        frames_entry(0),
        None,
        frames_per_batch=8,
        max_frames_per_traj=3,
        trajs_per_batch=2,
        compact_obs=True,
        observation_dtype={"frame": torch.float32},
    ) as collector:
        td = collector.next()
    assert td["frame"].dtype == torch.float32
    assert "frame" not in td["next"]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"observation_dtype": "frame"}, TypeError, "observation_dtype"),
    ({"observation_dtype": 3}, TypeError, "observation_dtype"),
    ({"observation_dtype": torch.bool}, ValueError, "observation_dtype"),
    ({"observation_dtype": {"frame": torch.complex64}}, ValueError, "observation_dtype"),
    ({"observation_dtype": {3: torch.float32}}, TypeError, "observation_dtype"),
    ({"observation_scale": "255"}, TypeError, "observation_scale"),
    ({"observation_scale": True}, TypeError, "observation_scale"),
    ({"observation_scale": float("inf")}, ValueError, "observation_scale"),
    ({"observation_dtype": torch.int16, "observation_scale": 0.5}, ValueError, "observation_scale"),
    ({"observation_dtype": {"pixels": torch.float32}}, ValueError, "observation_dtype"),
    ({"observation_scale": {"pixels": 2.0}}, ValueError, "observation_scale"),
]


@pytest.mark.parametrize(("arguments", "error", "name"), BAD, ids=str)
def test_invalid_casts(arguments: dict[str, Any], error: Any, name: str) -> None:
    with refused(error, name):
        SyncDataCollector(frames_entry(0), None, frames_per_batch=8, **arguments)


@pytest.mark.parametrize("source", [torch.uint8, torch.int8, torch.int16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1 / 255, 0.5, -3.7, 1e-3])
def test_a_cast_in_one_pass_gives_the_same_bits(
    source: torch.dtype, target: torch.dtype, scale: float
) -> None:
    limits = torch.iinfo(source)
    frames = torch.arange(limits.min, limits.max + 1).to(source)
    expected = scaled(frames, target, scale)  # in two passes, on the CPU
    assert torch.equal(scaled_at_once(frames, target, scale), expected) or not _fits(source, target)
    assert _fits(source, target) is torch.equal(frames.to(target).to(source), frames)


@pytest.mark.parametrize(
    ("source", "device", "is_one"),
    [(torch.uint8, "meta", True), (torch.float64, "meta", False), (torch.uint8, "cpu", False)],
)
def test_integers_on_a_device_are_cast_in_one_pass(
    source: torch.dtype, device: str, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def noted(*arguments: Any) -> torch.Tensor:
        asked.append(arguments)
        return scaled_at_once(*arguments)

    monkeypatch.setattr("pycollect.data.cast.scaled_at_once", noted)
    result = scaled(torch.zeros(4, dtype=source, device=device), torch.float32, 0.5)
    assert (result.dtype, result.device.type) == (torch.float32, device)
    assert bool(asked) is is_one

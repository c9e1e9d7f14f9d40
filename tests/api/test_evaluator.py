"""Evaluator: measure the return of the newest weights during training."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from agent_envs import Crowd
from envs_for_tests import CountingEnv
from gymnasium.vector import SyncVectorEnv
from raising import refused
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from pycollect import Evaluator


class Counting(CountingEnv):
    """An environment that cycles through its episode lengths and rewards with the action."""

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return (observation, float(action), *rest)


class Waiting(Counting):
    """An environment with episodes of three steps that waits for an event before each step."""

    def __init__(self, going: threading.Event) -> None:
        super().__init__(0, (3,))
        self.going = going

    def step(self, action: Any) -> Any:
        self.going.wait(60)
        return super().step(action)


class Worth(torch.nn.Module):
    """A policy that returns its only parameter as the action."""

    def __init__(self) -> None:
        super().__init__()
        self.worth = torch.nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.worth.round().long().expand(observation.shape[:-1])


def policy(worth: float = 0.0) -> TensorDictModule:
    module = TensorDictModule(Worth(), ["observation"], ["action"])
    with torch.no_grad():
        module.module.worth.fill_(worth)
    return module


def short_and_long() -> list[Any]:
    return [partial(Counting, 0, (2,)), partial(Counting, 1, (20,))]


WAYS = [
    pytest.param("thread"),
    pytest.param("process", marks=pytest.mark.processes),
    pytest.param("ray", marks=pytest.mark.ray),
]


@pytest.mark.parametrize("backend", WAYS)
def test_the_current_weights_are_evaluated(backend: str) -> None:
    trained = policy(1.0)
    env = partial(Counting, 0, (3, 5))
    with Evaluator(env, trained, num_trajectories=4, backend=backend) as evaluator:
        first = evaluator.evaluate()
        assert first["eval/reward"] == first["eval/episode_length"] == 4.0
        assert first["eval/num_episodes"] == 4
        assert first["eval/reward_std"] == pytest.approx((4 / 3) ** 0.5)
        assert first["eval/fps"] > 0
        with torch.no_grad():
            trained.module.worth.fill_(0.0)
        assert evaluator.evaluate()["eval/reward"] == 0.0
        given = TensorDict.from_module(policy(1.0)).data
        assert evaluator.evaluate(given, step=7) | {"eval/fps": 0} == {
            **first,
            "eval/fps": 0,
            "eval/step": 7,
        }


class Half(Worth):
    """A policy with the sum of two parameters as its action."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (self.worth + self.other).round().long().expand(observation.shape[:-1])


def test_parameters_tied_after_construction() -> None:
    trained = TensorDictModule(Half(), ["observation"], ["action"])
    with Evaluator(partial(Counting, 0, (1,)), trained, num_trajectories=1) as evaluator:
        trained.module.other = trained.module.worth
        with torch.no_grad():
            trained.module.worth.fill_(0.5)
        assert evaluator.evaluate()["eval/reward"] == 1.0


@pytest.mark.parametrize("entry", [short_and_long(), lambda: SyncVectorEnv(short_and_long())])
def test_long_episodes_count_as_much_as_short_ones(entry: Any) -> None:
    with Evaluator(entry, policy(1.0), num_trajectories=6, frames_per_batch=14) as evaluator:
        result = evaluator.evaluate()
    assert result["eval/num_episodes"] == 6
    assert result["eval/episode_length"] == 11.0


def test_an_evaluation_during_training_uses_the_weights_of_its_start() -> None:
    trained, heard = policy(1.0), []
    going = threading.Event()
    entry = [partial(Counting, 0, (3,))]
    with Evaluator(entry, trained, num_trajectories=2, on_result=heard.append) as evaluator:
        assert evaluator.poll() is None
        assert evaluator.wait() is None
    entry = [partial(Waiting, going)]
    with Evaluator(entry, trained, num_trajectories=2, on_result=heard.append) as evaluator:
        going.set()
        assert evaluator.evaluate()["eval/reward"] == 3.0
        going.clear()
        assert evaluator.trigger_eval(step=5)
        assert evaluator.pending
        assert not evaluator.trigger_eval()
        assert evaluator.poll() is None
        with torch.no_grad():
            trained.module.worth.fill_(0.0)
        going.set()
        result = evaluator.wait(60)
        assert result is not None
        assert (result["eval/reward"], result["eval/step"]) == (3.0, 5)
    assert [td["eval/step"].item() for td in heard] == [0, 5]


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    env, wrong = partial(Counting, 0, (3,)), {"module.worth": torch.zeros(5)}
    with Evaluator(env, policy(), num_trajectories=1) as evaluator:
        with refused(TypeError, "weights"):
            evaluator.evaluate(3)
        with refused(TypeError, "weights"):
            evaluator.trigger_eval({"module.worth": 3})
        for given in ({"weights": wrong}, {"weights_dict": {"policy": wrong}}):
            with refused(ValueError, "weights"):
                evaluator.evaluate(**given)
        evaluator.trigger_eval(wrong)
        with refused(ValueError, "weights"):
            evaluator.wait()
        assert evaluator.evaluate()["eval/reward"] == 0.0


def test_a_busy_evaluator_can_raise() -> None:
    going = threading.Event()
    going.set()
    with Evaluator(partial(Waiting, going), policy(), busy_policy="error") as evaluator:
        going.clear()
        evaluator.trigger_eval()
        with refused(RuntimeError, "trigger_eval"):
            evaluator.trigger_eval()
        going.set()


def test_queued_evaluations_return_in_order() -> None:
    env = partial(Counting, 0, (3,))
    with Evaluator(env, policy(1.0), num_trajectories=1, busy_policy="queue") as evaluator:
        assert all(evaluator.trigger_eval(policy(worth), step=worth) for worth in (2, 0, 1))
        results = [evaluator.wait(60) for _ in range(3)]
    assert [own and own["eval/reward"] for own in results] == [6.0, 0.0, 3.0]


def test_only_every_nth_trigger_evaluates() -> None:
    with Evaluator(
        partial(Counting, 0, (3,)), policy(), num_trajectories=1, every=3, busy_policy="queue"
    ) as evaluator:
        assert [evaluator.trigger_eval() for _ in range(7)] == [True, *[False, False, True] * 2]


def test_the_same_episodes_with_a_seed() -> None:
    with Evaluator("CartPole-v1", None, num_trajectories=5, seed=3) as evaluator:
        first, second = evaluator.evaluate(), evaluator.evaluate()
    assert first["eval/reward"] == second["eval/reward"]


def test_long_episodes_are_truncated_and_custom_metrics_reported() -> None:
    def longest(td: TensorDictBase) -> dict[str, float]:
        return {"longest": float(td["collector", "mask"].sum(1).max())}

    with Evaluator(
        partial(Counting, 0, (3, 50)),
        policy(1.0),
        num_trajectories=2,
        max_steps=10,
        metrics_fn=longest,
        log_prefix="test",
    ) as evaluator:
        result = evaluator.evaluate()
    assert result["test/longest"] == 10.0
    assert result["test/episode_length"] == 6.5


def test_an_exception_of_the_environment_is_raised_with_the_result() -> None:
    class Broken(Counting):
        def step(self, action: Any) -> Any:
            raise ZeroDivisionError("own words")

    with Evaluator(Broken, policy()) as evaluator:
        assert evaluator.trigger_eval()
        with pytest.raises(ZeroDivisionError, match="own words"):
            evaluator.wait(60)


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"num_trajectories": 0}, ValueError, "num_trajectories"),
        ({"busy_policy": "wait"}, ValueError, "busy_policy"),
        ({"backend": "mpi"}, ValueError, "backend"),
        ({"num_workers": 2}, ValueError, "num_workers"),
        ({"ray_kwargs": {}}, ValueError, "ray_kwargs"),
        ({"metrics_fn": 3}, TypeError, "metrics_fn"),
        ({"every": 0}, ValueError, "every"),
        ({"reward_keys": 3}, TypeError, "reward_keys"),
        ({"reward_keys": [("next", "reward")]}, TypeError, "reward_keys"),
        ({"num_collectors": 2}, TypeError, "num_collectors"),
        ({"policy_device": "cpu"}, TypeError, "policy_device"),
        ({"max_frames_per_traj": 3}, TypeError, "max_frames_per_traj"),
        ({"interruptor": 1}, TypeError, "interruptor"),
        ({"max_steps": "a"}, TypeError, "max_steps"),
        ({"collector_kwargs": 3}, TypeError, "collector_kwargs"),
        *(
            ({"collector_kwargs": {name: value}}, ValueError, "collector_kwargs")
            for name, value in {
                "drop_uncollected": True,
                "split_trajs": True,
                "trajs_per_batch": 2,
                "postproc": lambda td: td.reshape(-1),
                "replay_buffer": [],
                "total_frames": 30,
                "set_truncated": True,
                "reset_at_each_iter": True,
                "init_random_frames": 10,
                "cat_results": -1,
            }.items()
        ),
    ],
)
def test_refused(arguments: dict[str, Any], error: type[Exception], name: str) -> None:
    with refused(error, name) as caught:
        Evaluator(Counting, policy(), **arguments)
    meant = {"num_collectors": "num_workers", "policy_device": "device"}
    assert meant.get(name, "") in str(caught.value)
    if isinstance(arguments.get("collector_kwargs"), dict):
        assert all(repr(key) in str(caught.value) for key in arguments["collector_kwargs"])


def test_arguments_without_effect_are_accepted() -> None:
    without = {"total_frames": -1, "trajs_per_batch": -1, "postproc": None, "split_trajs": False}
    with Evaluator(Counting, policy(1.0), num_trajectories=2, collector_kwargs=without) as own:
        assert own.evaluate()["eval/num_episodes"] == 2
    with refused(ValueError, "frames_per_batch"):
        Evaluator(Counting, policy(), frames_per_batch=0)


def test_a_default_number_of_frames_causes_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    with Evaluator([Counting] * 3, policy(), num_trajectories=3, max_steps=0) as evaluator:
        assert evaluator.evaluate()["eval/num_episodes"] == 3
    assert not [own for own in recwarn if "frames_per_batch" in str(own.message)]


def test_an_evaluator_refuses_calls_after_shutdown() -> None:
    evaluator = Evaluator(Counting, policy())
    evaluator.shutdown()
    evaluator.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        evaluator.trigger_eval()


def test_a_reward_may_lack_a_last_dimension() -> None:
    with Evaluator(CountingEnv, lambda o: o[..., 0].long() * 0 + 1, reward_keys="action") as own:
        result = own.evaluate()
    assert result["eval/reward"] == result["eval/episode_length"]


@pytest.mark.parametrize(
    "key", [("next", "reward"), ("next", "agent"), ("next", "agent", "reward", "sum"), "score"]
)
def test_a_missing_reward(key: Any) -> None:
    with (
        Evaluator(Crowd, num_trajectories=1, reward_keys=key) as evaluator,
        refused(ValueError, "reward_keys") as caught,
    ):
        evaluator.evaluate()
    assert "('next', 'agent', 'reward')" in str(caught.value)

"""Evaluator compared with TorchRL's: names, results, and effects on its arguments."""

from __future__ import annotations

import inspect
import threading
from functools import partial
from typing import Any

import pytest
import torch
from raising import refused
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

import pycollect

pytest.importorskip("torchrl")

from torchrl import collectors
from torchrl.envs import Compose, RewardSum, SerialEnv, StepCounter, TransformedEnv, VecNormV2
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

if not hasattr(collectors, "Evaluator"):
    pytest.skip("TorchRL has no Evaluator", allow_module_level=True)

BOTH = [
    pytest.param(collectors.Evaluator, id="torchrl"),
    pytest.param(pycollect.Evaluator, id="pycollect"),
]


def policy(env: Any = None) -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(7, 7), ["observation"], ["action"])


def policy_for(env: Any) -> TensorDictModule:
    assert env.observation_spec["observation"].shape[-1] == 7
    return policy()


def one_env() -> Any:
    return ContinuousActionVecMockEnv()


class Gated(ContinuousActionVecMockEnv):  # type: ignore[misc] # TorchRL has no types
    """Step only while the gate is open."""

    gate = threading.Event()

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.gate.wait(60)
        return super()._step(*args, **kwargs)


def normalised_env() -> Any:
    normaliser = VecNormV2(in_keys=["observation"], out_keys=["observation"])
    return TransformedEnv(one_env(), Compose(StepCounter(3), normaliser))


def counted(steps: int) -> Any:
    return TransformedEnv(one_env(), StepCounter(max_steps=steps))


def batched_env() -> Any:
    return TransformedEnv(SerialEnv(2, [partial(counted, 3), partial(counted, 5)]), RewardSum())


@pytest.mark.parametrize("name", ["__init__", "evaluate", "trigger_eval", "poll", "wait"])
def test_every_argument_of_torchrls_is_accepted(name: str) -> None:
    ours, theirs = (
        inspect.signature(getattr(cls, name)).parameters
        for cls in (pycollect.Evaluator, collectors.Evaluator)
    )
    assert theirs.keys() <= ours.keys()
    kinds = {p.kind for name, p in ours.items() if name not in theirs}
    assert kinds <= {inspect.Parameter.KEYWORD_ONLY}


def test_every_public_name_of_torchrls_exists() -> None:
    assert [n for n in dir(collectors.Evaluator) if n[0] != "_"] == sorted(
        n for n in dir(pycollect.Evaluator) if n[0] != "_"
    )


def test_results_equal_torchrls() -> None:
    results = []
    for evaluator in (collectors.Evaluator, pycollect.Evaluator):
        own = evaluator(batched_env(), policy(), num_trajectories=1, max_steps=20)
        result = own.evaluate(step=7)
        own.shutdown()
        results.append({name: type(value) for name, value in result.items()})
    assert results[1] == {**results[0], "eval/fps": float}


@pytest.mark.parametrize("evaluator", BOTH)
def test_envs_that_count_steps_end_by_themselves(evaluator: Any) -> None:
    own = evaluator(batched_env(), policy(), num_trajectories=8, max_steps=2)
    assert own.evaluate()["eval/num_episodes"] == 8
    assert 3 <= own.evaluate()["eval/episode_length"] <= 5
    own.shutdown()


@pytest.mark.parametrize("evaluator", BOTH)
@pytest.mark.parametrize("given", ["instance", "callable"])
def test_running_statistics_stay(evaluator: Any, given: str) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(normalised_env())
        return made[-1]

    own = evaluator(make() if given == "instance" else make, policy(), num_trajectories=2)
    own.evaluate()
    own.shutdown()
    assert [env.transform[1].frozen for env in made] == [True]


@pytest.mark.parametrize("evaluator", BOTH)
@pytest.mark.parametrize("backend", ["thread", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("factory", [policy, policy_for])
def test_a_factory_may_ask_for_the_environment(evaluator: Any, backend: str, factory: Any) -> None:
    if evaluator is collectors.Evaluator and backend == "process" and factory is policy_for:
        pytest.skip("it calls factories without arguments in a process")
    own = evaluator(
        one_env, policy_factory=factory, max_steps=4, num_trajectories=2, backend=backend
    )
    try:
        assert own.evaluate()["eval/episode_length"] == 4
        assert own.evaluate(policy())["eval/episode_length"] == 4
    finally:
        own.shutdown()


@pytest.mark.parametrize("evaluator", BOTH)
def test_the_policy_acts_in_evaluation_mode(evaluator: Any) -> None:
    class Telling(nn.Module):
        def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros_like(observation), torch.full_like(observation, self.training)

    def trained(td: TensorDictBase) -> dict[str, float]:
        return {"training": float(td["training"].sum())}

    module = TensorDictModule(Telling(), ["observation"], ["action", "training"])
    own = evaluator(one_env(), module, max_steps=4, num_trajectories=1, metrics_fn=trained)
    assert own.evaluate()["eval/training"] == 0
    own.shutdown()
    assert module.training


@pytest.mark.parametrize("evaluator", BOTH)
def test_weights_in_all_forms(evaluator: Any) -> None:
    own = evaluator(one_env(), policy(), max_steps=4, num_trajectories=1)
    weights = evaluator.extract_weights(policy())
    assert weights["module", "weight"].shape == (7, 7)
    for given in ({"weights": weights}, {"weights_dict": {"policy": weights}}):
        assert own.evaluate(**given)["eval/num_episodes"] == 1
    assert own.evaluate(policy(), weights_dict={})["eval/num_episodes"] == 1
    own.shutdown()


@pytest.mark.parametrize("evaluator", BOTH)
def test_steps_are_counted_and_restored(evaluator: Any) -> None:
    Gated.gate.set()
    own = evaluator(Gated(), policy(), max_steps=4, num_trajectories=1)
    steps = [own.evaluate(step=step)["eval/step"] for step in (None, 9, None)]
    assert steps == [0, 9, 1]
    state = own.state_dict()
    own.load_state_dict({"step_counter": 5})
    assert own.evaluate()["eval/step"] == 5
    Gated.gate.clear()
    own.trigger_eval()
    with pytest.raises(RuntimeError):
        own.state_dict()
    Gated.gate.set()
    own.shutdown()
    assert state["step_counter"] == 2


def test_nothing_is_pending_after_a_shutdown() -> None:
    own = pycollect.Evaluator(one_env(), policy(), max_steps=2000)  # TorchRL's raises in its thread
    own.trigger_eval()
    assert own.pending
    own.shutdown()
    assert not own.pending


def test_errors_are_raised_at_construction() -> None:
    def broken() -> Any:
        raise ZeroDivisionError("own words")

    their_own = collectors.Evaluator(broken, policy_factory=policy_for)
    their_own.shutdown()
    for given in ({"policy_factory": policy_for}, {"policy": policy()}):
        with pytest.raises(ZeroDivisionError, match="own words"):
            pycollect.Evaluator(broken, **given)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"collector_cls": "Collector"}, "collector_cls"),
        ({"done_keys": ("next", "over")}, "done_keys"),
        ({"num_gpus": 1}, "num_gpus"),
        ({"policy_factory": policy}, "policy_factory"),
    ],
)
def test_errors_of_refused_arguments_name_the_alternative(given: dict[str, Any], name: str) -> None:
    env = one_env()
    with refused(ValueError, name):
        pycollect.Evaluator(env, policy(), **given)
    with pycollect.Evaluator(env, policy(), num_trajectories=1, max_steps=2) as own:
        with refused(ValueError, "weights_dict"):
            own.evaluate(weights_dict={"env.transform[0]": policy()})
        assert own.evaluate()["eval/episode_length"] == 2


def test_an_environment_is_closed_if_the_policy_factory_fails() -> None:
    class Closing(ContinuousActionVecMockEnv):  # type: ignore[misc]
        closed = 0

        def close(self, **kwargs: Any) -> None:
            type(self).closed += 1
            super().close(**kwargs)

    def broken() -> Any:
        raise ZeroDivisionError("own words")

    with pytest.raises(ZeroDivisionError):
        pycollect.Evaluator(Closing, policy_factory=broken)
    assert Closing.closed == 1


def test_rewards_of_another_name() -> None:
    own = pycollect.Evaluator(
        one_env(), policy(), max_steps=4, num_trajectories=1, reward_keys=("next", "done")
    )
    assert own.evaluate()["eval/reward"] == 1
    own.shutdown()

"""TorchRL environments: the frames that TorchRL's own collector gives, from every kind of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from tensordict.nn import TensorDictSequential
from torchrl_support import (
    ENVS,
    MAX_STEPS,
    WITHOUT_A_LIMIT,
    compare,
    counting_policy,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own extension does not load beside a newer torch
    pytest.importorskip("torchrl")
    import torchrl.testing.mocking_classes as mock
    from torchrl.envs import (
        ParallelEnv,
        StepCounter,
        TransformedEnv,
    )


@pytest.mark.parametrize("name", ENVS)
def test_frames(name: str) -> None:
    compare(ENVS[name])


@pytest.mark.parametrize("name", [name for name in ENVS if name not in WITHOUT_A_LIMIT])
def test_frames_with_a_limit(name: str) -> None:
    compare(ENVS[name], **MAX_STEPS)


@pytest.mark.parametrize("name", ["CountingEnv", "CountingBatchedEnv [3]", "SerialEnv"])
def test_frames_flagged_at_the_end(name: str) -> None:
    compare(ENVS[name], **MAX_STEPS, set_truncated=True)
    if name != "SerialEnv":
        compare(lambda: ENVS[name]().add_truncated_keys(), set_truncated=True)


@pytest.mark.parametrize("name", ["CountingEnv", "CountingBatchedEnv [3]", "SerialEnv"])
def test_frames_reset_at_each_iter(name: str) -> None:
    compare(ENVS[name], **MAX_STEPS, reset_at_each_iter=True)


@pytest.mark.slow
@pytest.mark.parametrize("transformed", [False, True])
def test_parallel_env(transformed: bool) -> None:
    def make() -> Any:
        env = ParallelEnv(
            2, [lambda n=n: mock.CountingEnv(max_steps=n) for n in (3, 5)], mp_start_method="spawn"
        )
        return TransformedEnv(env, StepCounter()) if transformed else env

    compare(make, batches=2)


@pytest.mark.parametrize("kwargs", [{}, MAX_STEPS])
@pytest.mark.parametrize("name", ["CountingEnv", "CountingEnv [3]", "SerialEnv", "RewardSum [2]"])
def test_policy(name: str, kwargs: dict[str, Any]) -> None:
    compare(ENVS[name], counting_policy, **kwargs)


def test_policy_of_several_agents() -> None:
    def make_policy() -> Any:
        act = mock.MultiKeyCountingEnvPolicy(
            full_action_spec=mock.MultiKeyCountingEnv().full_action_spec
        )
        return TensorDictSequential(act)

    compare(ENVS["MultiKeyCountingEnv"], make_policy)

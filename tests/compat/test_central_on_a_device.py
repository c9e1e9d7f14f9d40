"""TorchRL's policies and environments where what no worker reads stays on the policy's device."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from collect_support import CENTRAL, STEPS
from echo_envs import ENTRIES, LENGTHS, EchoEnv
from tensordict.nn import TensorDictModule, TensorDictSequential
from test_central_device import apart
from test_central_policies import Heads, Value
from test_central_staying import assert_equal, check_says, noting, staying, there

from pycollect.batch.room import Room
from pycollect.scheduler import scheduler as scheduling

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own extension does not load beside a newer torch
    pytest.importorskip("torchrl")
    from torch.distributions import Categorical
    from torchrl.envs import GymWrapper, StepCounter, TransformedEnv
    from torchrl.modules import ProbabilisticActor, ValueOperator

__all__ = ["apart", "there"]  # fixtures

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.processes(usual=2)]


def test_probabilities_and_values_are_the_same() -> None:
    torch.manual_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(Heads(), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    policy = TensorDictSequential(actor, ValueOperator(Value(), in_keys=["observation"]))

    def batches() -> list[Any]:
        with staying(CENTRAL, ENTRIES["list"], frames=3 * STEPS, policy=policy) as collector:
            collector.set_seed(3)
            return [collector.next() for _ in range(3)]

    with pytest.MonkeyPatch.context() as patch:
        filled: list[Room] = []
        patch.setattr(Room, "filled", noting(filled))
        ours = batches()
        assert [len(room.tensors) for room in filled] == [3] * 3
        patch.setattr(scheduling, "why_nothing_stays", lambda *_: "as it was")
        for own, other in zip(ours, batches(), strict=True):
            assert_equal(own, other)


def plain(number: int) -> Any:
    return GymWrapper(EchoEnv(number, LENGTHS), categorical_action_encoding=True)


def transformed(number: int) -> Any:
    return TransformedEnv(plain(number), StepCounter())


@pytest.mark.parametrize(("make", "rooms"), [(plain, 2), (transformed, 0)])
def test_environments_that_are_given_all(make: Any, rooms: int) -> None:
    def entry(worker: int) -> Any:
        return partial(make, 10 * worker)

    with pytest.MonkeyPatch.context() as patch:
        filled: list[Room] = []
        patch.setattr(Room, "filled", noting(filled))
        with staying(CENTRAL, entry, frames=STEPS) as collector:
            for _ in range(2):
                check_says(collector.next())
        assert len(filled) == rooms

"""TorchRL's recurrent and actor-critic policies, with central inference and in the workers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from collect_support import CENTRAL, CENTRAL_ASYNC, MULTI_ASYNC, MULTI_STACK, STEPS, collecting
from echo_envs import ENTRIES, echo_fns, envs_of
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

pytest.importorskip("torchrl")

from torch.distributions import Categorical
from torchrl.data import Bounded
from torchrl.envs import GymWrapper, InitTracker, TransformedEnv
from torchrl.modules import (
    GRUModule,
    LSTMModule,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    ValueOperator,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.processes(usual=2)]


def parts(observation: torch.Tensor) -> torch.Tensor:
    return observation.float() / 10


def greedy(features: torch.Tensor) -> torch.Tensor:
    return (features.sum(-1) > 0).long()


def recurrent(module: Any) -> TensorDictSequential:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(parts, ["observation"], ["parts"]),
        module(input_size=3, hidden_size=4, in_key="parts", out_key="features"),
        TensorDictModule(greedy, ["features"], ["action"]),
    )


def rollouts(way: Any, kind: str, policy: Any) -> dict[int, TensorDictBase]:
    """Return two rollouts of each worker by its id, concatenated along time."""
    envs, _ = envs_of(kind)
    found: dict[int, list[TensorDictBase]] = {}
    with collecting(way, ENTRIES[kind], policy, frames=envs * STEPS) as collector:
        while len(found) < way.workers or min(map(len, found.values())) < 2:
            batch = collector.next().exclude(("collector", "traj_ids")).clone()
            for part in batch.unbind(0) if way.sync else [batch]:
                worker = int(part["observation"].flatten(0, -2)[0, 0]) // 10
                found.setdefault(worker, []).append(part)
    return {worker: torch.cat(own[:2], -1) for worker, own in found.items()}


@pytest.mark.parametrize("kind", ["one", "list"])
@pytest.mark.parametrize("module", [LSTMModule, GRUModule])
@pytest.mark.parametrize(
    "ways", [(MULTI_STACK, CENTRAL), (MULTI_ASYNC[0], CENTRAL_ASYNC)], ids=["sync", "async"]
)
def test_states_equal_those_of_a_policy_in_the_workers(ways: Any, module: Any, kind: str) -> None:
    policy = recurrent(module)
    there, here = (rollouts(way, kind, policy) for way in ways)
    assert sorted(here) == sorted(there)
    for worker, ours in here.items():
        theirs = there[worker]
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        state = next(key for key in ours.keys() if key.startswith("recurrent_state"))  # noqa: SIM118
        assert ours[state].any()
        # dicts, because the batch sizes differ
        torch.testing.assert_close(ours.to_dict(), theirs.to_dict())


def drift(called: bool) -> TensorDictSequential:
    """Return a policy with Ornstein-Uhlenbeck noise that only drifts, so that it is not random."""
    noise = OrnsteinUhlenbeckProcessModule(
        Bounded(-9, 9, (1,)), action_key="noise", mu=1.0, sigma=0.0, dt=1.0, device="cpu"
    )
    if called:  # with a TensorDict
        noise.register_forward_hook(lambda *_: None)
    return TensorDictSequential(
        TensorDictModule(
            lambda observation: torch.zeros_like(observation[..., :1], dtype=torch.float32),
            ["observation"],
            ["noise"],
        ),
        noise,
        TensorDictModule(lambda noise: (noise[..., 0] > 0.5).long(), ["noise"], ["action"]),
    )


@pytest.mark.parametrize(
    ("ways", "called"),
    [((MULTI_STACK, CENTRAL), True), ((MULTI_ASYNC[0], CENTRAL_ASYNC), False)],
    ids=["sync, tensordict", "async, tensors"],
)
def test_noise_equals_that_of_a_policy_in_the_workers(ways: Any, called: bool) -> None:
    there, here = (rollouts(way, "list", drift(called)) for way in ways)
    assert sorted(here) == sorted(there)
    for worker, ours in here.items():
        assert ours["noise"].unique().numel() > 2
        torch.testing.assert_close(ours["noise"], there[worker]["noise"])


def count_calls(td: TensorDictBase) -> TensorDictBase:
    number = td.get("_number", torch.full(td.batch_size, -1.0)) + 1
    action = torch.zeros(td.batch_size, dtype=torch.int64)
    return td.update({"_number": number, "number": number.clone(), "action": action})


def test_a_reset_drops_private_entries_of_a_policy() -> None:
    envs, _ = envs_of("list")
    with collecting(CENTRAL, ENTRIES["list"], count_calls, frames=envs * STEPS) as collector:
        numbers = [collector.next()["number"].clone() for _ in range(2)]
        collector.reset()
        numbers.append(collector.next()["number"].clone())
    steps = torch.arange(float(STEPS)).expand_as(numbers[0])
    for found, expected in zip(numbers, (steps, steps + STEPS, steps), strict=True):
        assert torch.equal(found, expected)


def tracked(worker: int) -> Any:
    return TransformedEnv(GymWrapper(echo_fns(worker)[0]()), InitTracker())


def choose(observation: torch.Tensor, is_init: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return nn.functional.one_hot((observation[..., 2] % 2).long(), 2), is_init.clone()


@pytest.mark.parametrize("way", [CENTRAL, CENTRAL_ASYNC], ids=lambda way: way.name)
def test_first_steps_that_the_environment_tracks(way: Any) -> None:
    policy = TensorDictModule(choose, ["observation", "is_init"], ["action", "seen"])
    with collecting(way, lambda w: partial(tracked, w), policy, frames=2 * STEPS) as collector:
        batch = collector.next()
    assert torch.equal(batch["is_init"], batch["observation"][..., 2:] == 0)
    assert torch.equal(batch["seen"], batch["is_init"])


class Heads(nn.Module):
    """Two logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.linear(observation.float() / 10)


class Value(Heads):
    """The first of two outputs."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation)[..., :1]


@pytest.mark.parametrize("way", [CENTRAL, CENTRAL_ASYNC], ids=lambda way: way.name)
def test_actions_with_log_probability_and_value(way: Any) -> None:
    torch.manual_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(Heads(), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    value = ValueOperator(Value(), in_keys=["observation"])
    policy = TensorDictSequential(actor, value)
    envs, _ = envs_of("list")
    with collecting(way, ENTRIES["list"], policy, frames=envs * STEPS) as collector:
        batch = collector.next().clone()
    drawn = Categorical(logits=batch["logits"])
    log_prob = next(key for key in batch.keys() if key.endswith("log_prob"))  # noqa: SIM118
    torch.testing.assert_close(batch[log_prob], drawn.log_prob(batch["action"]))
    assert batch["action"].unique().numel() == 2
    with torch.no_grad():
        again = value(TensorDict({"observation": batch["observation"]}, batch.shape))
    torch.testing.assert_close(batch["state_value"], again["state_value"])

"""Policies from modules of tensordict and TorchRL that `program_policies.py` does not use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    WrapModule,
    set_skip_existing,
)
from torch import distributions, nn
from torchrl.data import Composite, Unbounded
from torchrl.modules import (
    MLP,
    Actor,
    ActorCriticOperator,
    IndependentNormal,
    MultiStepActorWrapper,
    ProbabilisticActor,
    SafeModule,
    TanhModule,
    ValueOperator,
)

OBSERVATION = ["observation"]


class Skipping(TensorDictModuleBase):
    """Skip existing outputs, such as the last action at its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TensorDictModule(nn.Linear(3, 1), OBSERVATION, ["action"])

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        with set_skip_existing(True):
            return self.inner(td)


class Ensemble(TensorDictModuleBase):
    """Return the mean of three layers, by vmap over their parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(3, 1) for _ in range(3)]
        self.parameters_of_all = TensorDict.from_modules(*layers, as_module=True)
        self.layer = nn.Linear(3, 1)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        def call(observation: torch.Tensor, parameters: Any) -> torch.Tensor:
            with parameters.to_module(self.layer):
                return self.layer(observation)

        votes = torch.vmap(call, (None, 0))(td["observation"], self.parameters_of_all)
        return td.update({"action": votes.mean(0), "votes": votes.movedim(0, -1)})


def normal(env: Any, **options: Any) -> Any:
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, OBSERVATION, ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=IndependentNormal,
        **options,
    )


def composite(env: Any) -> Any:
    """Draw two samples from one distribution with nested parameters."""
    keys = [("params", *key) for key in (("action", "loc"), ("action", "scale"), ("aux", "logits"))]
    kinds = {"action": distributions.Normal, "aux": distributions.Categorical}
    return ProbabilisticTensorDictSequential(
        TensorDictModule(lambda o: (o[..., :1], o[..., 1:2].exp(), o), OBSERVATION, keys),
        ProbabilisticTensorDictModule(
            in_keys=["params"],
            out_keys=["action", "aux"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": kinds},
            return_log_prob=True,
        ),
    )


def critic(env: Any) -> Any:
    return ActorCriticOperator(
        TensorDictModule(nn.Linear(3, 8), OBSERVATION, ["hidden"]),
        Actor(nn.Linear(8, 1), in_keys=["hidden"]),
        ValueOperator(
            MLP(in_features=9, out_features=1, num_cells=[4]), in_keys=["hidden", "action"]
        ),
    )


def with_spec_of_all(env: Any) -> Any:
    return SafeModule(
        lambda o: (o[..., :1] * 1, o * 2),
        in_keys=OBSERVATION,
        out_keys=["action", "double"],
        spec=Composite(action=env.action_spec, double=Unbounded(3)),
    )


def in_two_steps() -> Any:
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), OBSERVATION, ["hidden"]),
        TensorDictModule(nn.Linear(4, 1), ["hidden"], ["action"]),
    )


def steps_ahead(env: Any) -> Any:
    """Compute three actions at once and return them one by one; they are stored at the root."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Unflatten(-1, (3, 1)))
    return MultiStepActorWrapper(Actor(net, in_keys=OBSERVATION), n_steps=3)


LIBRARY: dict[str, Callable[[Any], Any]] = {
    "selected outputs": lambda env: in_two_steps().select_out_keys("action"),
    "selected outputs, a distribution": lambda env: normal(
        env, return_log_prob=True
    ).select_out_keys("action"),
    "a generator of its own": lambda env: normal(env, generator=torch.Generator().manual_seed(5)),
    "composite distribution": composite,
    "actor and critic": critic,
    "policy of actor and critic": lambda env: critic(env).get_policy_operator(),
    "spec of all outputs": with_spec_of_all,
    "TanhModule": lambda env: TensorDictSequential(
        Actor(nn.Linear(3, 1)), TanhModule(in_keys=["action"], spec=env.action_spec)
    ),
    "WrapModule": lambda env: WrapModule(
        lambda td: td.set("action", td["observation"][..., :1] * 1)
    ),
    "keys by argument": lambda env: TensorDictModule(
        lambda seen: seen[..., :1] * 1, in_keys={"seen": "observation"}, out_keys=["action"]
    ),
    "not in place": lambda env: TensorDictModule(
        nn.Linear(3, 1), OBSERVATION, ["action"], inplace=False
    ),
    "what is there is skipped": lambda env: Skipping(),
    "vmap": lambda env: Ensemble(),
    "compiled in two steps": lambda env: torch.compile(in_two_steps(), backend="eager"),
    "several steps ahead": steps_ahead,
}

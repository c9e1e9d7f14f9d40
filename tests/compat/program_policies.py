"""The policies of the table of programs: each side makes its own, with the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torchrl.data import Bounded, Categorical, OneHot
from torchrl.modules import (
    MLP,
    Actor,
    ActorValueOperator,
    AdditiveGaussianModule,
    ConvNet,
    Delta,
    EGreedyModule,
    GRUModule,
    IndependentNormal,
    LSTMModule,
    MaskedCategorical,
    NoisyLinear,
    OneHotCategorical,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    RandomPolicy,
    TanhDelta,
    TanhNormal,
    TruncatedNormal,
    ValueOperator,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import this file

OBSERVATION = ["observation"]
TORQUE = Bounded(-2.0, 2.0, (1,))


def function_of_tensordict() -> Any:
    net = nn.Linear(3, 1)

    def act(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", net(td["observation"]))

    return act


def by_sum(
    *shape: int, most: int = 0, like: str = "observation", dtype: torch.dtype = torch.int64
) -> Callable[[], Any]:
    """Compute an action from the sum of the observation: floats, or integers below `most`."""

    def act(observation: torch.Tensor) -> torch.Tensor:
        total = (observation.double().sum() * 7).float()
        steps = total + torch.arange(float(max(1, torch.Size(shape).numel())))
        if most:
            return (steps.long() % most).view(shape).to(dtype)
        return steps.sin().view(shape)

    return lambda: TensorDictModule(act, [like], ["action"])


def choose(count: Sequence[int]) -> Callable[[], Any]:
    """Compute a MultiDiscrete action."""

    def act(observation: torch.Tensor) -> torch.Tensor:
        return (observation.double().sum() * 7).long() % torch.tensor(count)

    return lambda: TensorDictModule(act, OBSERVATION, ["action"])


def greedy_index() -> Any:
    """Return the better of two actions, for one env and for a batch of them."""
    net = nn.Linear(4, 2)
    return TensorDictModule(
        lambda observation: net(observation).argmax(-1), OBSERVATION, ["action"]
    )


def linear(in_features: int = 3) -> Any:
    return TensorDictModule(nn.Linear(in_features, 1), OBSERVATION, ["action"])


class Head(nn.Module):
    """A module over tensors, which the collector wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation)


class OnTensorDict(TensorDictModuleBase):
    """A module that is called with the TensorDict itself."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = OBSERVATION, ["action"]
        self.net = nn.Linear(3, 1)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", self.net(tensordict["observation"]))


def normal(distribution: Any = IndependentNormal, **kwargs: Any) -> Any:
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, OBSERVATION, ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=distribution,
        return_log_prob=True,
        **kwargs,
    )


def deterministic(distribution: Any) -> Any:
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(3, 1), OBSERVATION, ["param"]),
        in_keys=["param"],
        distribution_class=distribution,
    )


def actor_and_action_value() -> Any:
    value = MLP(in_features=4, out_features=1, num_cells=[4])
    return TensorDictSequential(
        Actor(MLP(in_features=3, out_features=1, num_cells=[8, 8])),
        ValueOperator(value, in_keys=["observation", "action"]),
    )


def categorical(key: str = "logits") -> Any:
    net = nn.Linear(4, 2) if key == "logits" else nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1))
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, OBSERVATION, [key]),
        ProbabilisticTensorDictModule(
            [key],
            ["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


def one_hot() -> Any:
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 2), OBSERVATION, ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )


def masked() -> Any:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(2, 4), OBSERVATION, ["logits"]),
        ProbabilisticTensorDictModule(
            {"logits": "logits", "mask": "action_mask"},
            ["action"],
            distribution_class=MaskedCategorical,
            return_log_prob=True,
        ),
    )


def actor_and_value() -> Any:
    common = TensorDictModule(nn.Linear(3, 8), OBSERVATION, ["hidden"])
    head = nn.Sequential(nn.Linear(8, 2), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(head, ["hidden"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    return ActorValueOperator(common, actor, ValueOperator(nn.Linear(8, 1), in_keys=["hidden"]))


def q_values() -> Any:
    return QValueActor(MLP(in_features=4, out_features=2, num_cells=[16]), spec=OneHot(2))


def epsilon_greedy() -> Any:
    return TensorDictSequential(q_values(), EGreedyModule(OneHot(2), eps_init=0.5, eps_end=0.5))


def with_noise() -> Any:
    noise = AdditiveGaussianModule(TORQUE, sigma_init=0.5, sigma_end=0.5, device="cpu")
    return TensorDictSequential(Actor(nn.Linear(3, 1), spec=TORQUE), noise)


def with_correlated_noise() -> Any:
    noise = OrnsteinUhlenbeckProcessModule(TORQUE, device="cpu")
    return TensorDictSequential(Actor(nn.Linear(3, 1), spec=TORQUE), noise)


def with_private_keys() -> Any:
    """Pass keys that begin with "_" between modules; batches do not contain them."""
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 8), OBSERVATION, ["_hidden"]),
        TensorDictModule(nn.Linear(8, 4), ["_hidden"], [("deep", "_er")]),
        TensorDictModule(nn.Linear(4, 4), [("deep", "_er")], [("deep", "seen")]),
        TensorDictModule(nn.Linear(4, 1), [("deep", "seen")], ["action"]),
    )


def noisy_linear() -> Any:
    return TensorDictModule(NoisyLinear(3, 1), OBSERVATION, ["action"])


def with_layer(layer: nn.Module) -> Any:
    return TensorDictModule(
        nn.Sequential(nn.Linear(3, 16), layer, nn.Linear(16, 1)), OBSERVATION, ["action"]
    )


def pixels() -> Any:
    net = nn.Sequential(
        ConvNet(in_features=1, num_cells=[4], kernel_sizes=[3], strides=[2]), nn.LazyLinear(7)
    )
    return TensorDictModule(
        lambda pixels: nn.functional.one_hot(net(pixels).argmax(-1), 7), ["pixels"], ["action"]
    )


def recurrent(kind: str, **options: Any) -> Any:
    cls = {"LSTM": LSTMModule, "GRU": GRUModule}[kind]
    module = cls(input_size=3, hidden_size=8, in_key="observation", out_key="hidden", **options)
    head = nn.Sequential(nn.Linear(8, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictSequential(module, TensorDictModule(head, ["hidden"], ["loc", "scale"])),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


def counting() -> Any:
    """A policy for TorchRL's counting environments that also writes a nested key."""

    def act(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (observation % 2 == 0).to(torch.int8), observation * 2.0

    return TensorDictModule(act, OBSERVATION, ["action", ("info", "double")])


def nested_counting() -> Any:
    def act(states: torch.Tensor) -> torch.Tensor:
        return torch.ones((*states.shape[:-1], 1), dtype=torch.int8)

    return TensorDictModule(act, [("data", "states")], [("data", "action")])


def by_flags() -> Any:
    """Read the flags of the current state, which are false."""
    flags = ("done", "terminated", "truncated")

    def act(*flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.cat(flags, -1)
        return 1 - seen.any(-1).long(), seen

    return TensorDictModule(act, list(flags), ["action", "seen"])


def by_step_count(td: TensorDictBase) -> TensorDictBase:
    """Read the step count, which TorchRL adds with `max_frames_per_traj`."""
    return td.update({"action": td["step_count"].squeeze(-1) % 2, "seen": td["step_count"] + 0})


def three_at_once() -> Any:
    """Compute three steps as one action of MultiAction."""
    return TensorDictModule(
        lambda seen: torch.ones((*seen.shape[:-1], 3, 1), dtype=torch.int8), OBSERVATION, ["action"]
    )


def of_dtype(name: str, dtype: torch.dtype) -> Any:
    """Return the policy with an action dtype other than the environment's."""
    return TensorDictSequential(
        POLICIES[name](), TensorDictModule(lambda action: action.to(dtype), ["action"], ["action"])
    )


POLICIES: dict[str, Callable[[], Any]] = {
    "random": lambda: None,
    "linear": linear,
    "module": Head,
    "module on the TensorDict": OnTensorDict,
    "function of the TensorDict": function_of_tensordict,
    "normal": normal,
    "TanhNormal": partial(normal, TanhNormal),
    "TruncatedNormal": partial(
        normal, TruncatedNormal, distribution_kwargs={"low": -2.0, "high": 2.0}
    ),
    "safe normal": partial(normal, spec=TORQUE, safe=True),
    "Delta": partial(deterministic, Delta),
    "TanhDelta": partial(deterministic, TanhDelta),
    "actor and action value": actor_and_action_value,
    "lazy": lambda: TensorDictModule(nn.LazyLinear(1), OBSERVATION, ["action"]),
    "RandomPolicy": lambda: RandomPolicy(TORQUE),
    "Q values by index": lambda: QValueActor(nn.Linear(4, 2), spec=Categorical(2)),
    "categorical": categorical,
    "probs": partial(categorical, "probs"),
    "one-hot": one_hot,
    "masked": masked,
    "actor and value": actor_and_value,
    "Q values": q_values,
    "epsilon-greedy": epsilon_greedy,
    "Gaussian noise": with_noise,
    "correlated noise": with_correlated_noise,
    "private keys": with_private_keys,
    "NoisyLinear": noisy_linear,
    "dropout": lambda: with_layer(nn.Dropout(0.5)),
    "LayerNorm": lambda: with_layer(nn.LayerNorm(16)),
    "pixels": pixels,
    "LSTM": partial(recurrent, "LSTM"),
    "GRU": partial(recurrent, "GRU"),
    "LSTM of 2 layers": partial(recurrent, "LSTM", num_layers=2),
    "GRU of 2 layers": partial(recurrent, "GRU", num_layers=2),
    "greedy": greedy_index,
    "linear in float64": partial(of_dtype, "linear", torch.float64),
    "Q values in float32": partial(of_dtype, "Q values", torch.float32),
    "counting in int64": partial(of_dtype, "counting", torch.int64),
    "by flags": by_flags,
    "by step count": lambda: by_step_count,
    "counting": counting,
    "three at once": three_at_once,
    "nested counting": nested_counting,
    "Box": by_sum(2, 2),
    "Discrete": by_sum(most=5),
    "MultiDiscrete": choose([3, 4]),
    "MultiBinary": by_sum(3, most=2, dtype=torch.int8),
    "Discrete by place": by_sum(most=5, like="place"),
}

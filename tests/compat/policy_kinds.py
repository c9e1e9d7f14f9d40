"""Policies in many forms: each factory makes one for an environment, with fixed weights."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.data.utils import CloudpickleWrapper
from torchrl.modules import Actor, AdditiveGaussianModule, RandomPolicy
from torchrl.testing import LSTMNet

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file

Make = Callable[[Any], Any]
OBSERVATION = ["observation"]


def by_observation(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", td["observation"][..., :1] * 1)


class Unannounced(TensorDictModuleBase):
    """A policy that declares no keys."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, data: Any) -> Any:
        return data.set("action", self.net(data["observation"]))


class CalledItself(Unannounced):
    def __call__(self, data: Any) -> Any:
        return self.forward(data)


class Talkative(TensorDictModuleBase):
    """A policy that writes more entries than needed."""

    def forward(self, data: Any) -> Any:
        one = data["observation"][..., :1]
        return data.update({"action": one * 2, "seen": one.double(), ("a", "b"): one > 0})


class OfItsOwn(TensorDictModuleBase):
    """Return a new TensorDict with only some of the input's entries."""

    def forward(self, data: Any) -> Any:
        one = data["observation"][..., :1]
        return TensorDict({"action": one * 2, "seen": one + 1}, data.batch_size)


class Copying(TensorDictModuleBase):
    def forward(self, data: Any) -> Any:
        return by_observation(data.clone()).set("seen", data["observation"] + 1)


class Methods:
    def on_tensordict(self, tensordict: Any) -> Any:
        return by_observation(tensordict)

    def by_default(self, tensordict: Any = None) -> Any:
        return by_observation(tensordict)

    def on_tensors(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[..., :1] * 1


def by_default_annotated(env: Any) -> Any:
    def act(data: Any = None) -> Any:
        return by_observation(data)

    # TorchRL does not resolve annotations in text form
    act.__annotations__["data"] = TensorDictBase
    return act


class Several(nn.Module):
    """Return the action and additional outputs."""

    def __init__(self, others: Callable[[torch.Tensor], tuple[Any, ...]]) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.others = others

    def forward(self, observation: torch.Tensor) -> Any:
        action = self.net(observation)
        return (action, *self.others(action))


def several(others: Callable[[torch.Tensor], tuple[Any, ...]]) -> Make:
    return lambda env: Several(others)


def best_of_two(observation: torch.Tensor) -> Any:
    """Return one of torch's own tuple classes."""
    return torch.stack([observation[..., 0], observation[..., 1]], -1).max(-1, keepdim=True)


def with_noise_of_the_env(env: Any) -> Any:
    noise = AdditiveGaussianModule(None, sigma_init=0.5, sigma_end=0.5, device="cpu")
    return TensorDictSequential(Actor(nn.Linear(3, 1)), noise)


TAKES_TENSORDICTS: dict[str, Make] = {
    "module": lambda env: TensorDictModule(nn.Linear(3, 1), OBSERVATION, ["action"]),
    "keys not told": lambda env: Unannounced(),
    "its own call": lambda env: CalledItself(),
    "writes more": lambda env: Talkative(),
    "another TensorDict": lambda env: OfItsOwn(),
    "a copy": lambda env: Copying(),
    "compiled": lambda env: torch.compile(Unannounced(), backend="eager"),
    "wrapped for pickling": lambda env: CloudpickleWrapper(Unannounced()),
    "rand_action": lambda env: env.rand_action,
    "method": lambda env: Methods().on_tensordict,
    "method, a default": lambda env: Methods().by_default,
    "annotated, a default": by_default_annotated,
    "no parameter but td": lambda env: lambda td=None: by_observation(td),
    "trusted": lambda env: lambda whatever: by_observation(whatever),
    "RandomPolicy": lambda env: RandomPolicy(env.full_action_spec),
    "RandomPolicy without a spec": lambda env: RandomPolicy(),
    "noise without a spec": with_noise_of_the_env,
}

TAKES_TENSORS: dict[str, Make] = {
    "method": lambda env: Methods().on_tensors,
    "partial": lambda env: functools.partial(
        lambda observation, by: observation[..., :1] * by, by=2
    ),
    "one more": several(lambda action: (action * 2,)),
    "two more": several(lambda action: (action > 0, action.expand(*action.shape[:-1], 4))),
    "nothing": several(lambda action: (None, action + 1)),
    "a tuple": several(lambda action: ((action, action + 1), action)),
    "a tuple of torch's": lambda env: best_of_two,
}


def counting(td: TensorDictBase) -> TensorDictBase:
    """Read the count of the last call."""
    count = td.get("count", torch.zeros(*td.shape, 1)) + 1
    return td.update({"count": count, "action": count.sin()})


def after_its_last_action(td: TensorDictBase) -> TensorDictBase:
    before = td.get("action", torch.zeros(*td.shape, 1))
    return td.set("action", (before + td["observation"][..., :1]).sin())


def as_module(function: Callable[..., Any], reads: str, *writes: Any) -> Make:
    """Return a module that reads the observation and its last output, which is None at first."""

    def call(observation: torch.Tensor, before: torch.Tensor | None) -> Any:
        zeros = torch.zeros(*observation.shape[:-1], 1)
        return function(observation[..., :1], zeros if before is None else before)

    return lambda env: TensorDictModule(call, ["observation", reads], ["action", *writes])


def lstm(env: Any) -> Any:
    """Return an LSTM as in TorchRL's tests, which returns its old state and its new state."""
    net = LSTMNet(1, {"input_size": 12, "hidden_size": 12}, {"out_features": 12})
    states = ["hidden1", "hidden2"]
    policy = TensorDictModule(
        net, ["observation", *states], ["action", *states, *(("next", key) for key in states)]
    )
    policy(env.reset())  # initializes its lazy layers
    return policy


def with_next(td: TensorDictBase) -> TensorDictBase:
    """Write a prediction under "next"."""
    one = td["observation"][..., :1]
    return td.update({"action": one * 2, ("next", "expected"): one + 1})


def with_root_and_next(td: TensorDictBase) -> TensorDictBase:
    hidden = td.get("hidden", torch.zeros(*td.shape, 1))
    after = (hidden + td["observation"][..., :1]).tanh()
    return td.update({"action": hidden + after, "hidden": hidden, ("next", "hidden"): after})


def normalised(observation: torch.Tensor) -> torch.Tensor:
    return observation / 8


def normalising(then: Callable[[], Any]) -> Make:
    """Normalize the observation in place."""
    return lambda env: TensorDictSequential(
        TensorDictModule(normalised, OBSERVATION, OBSERVATION),
        TensorDictModule(then(), OBSERVATION, ["action"]),
    )


def normalising_the_tensordict(td: TensorDictBase) -> TensorDictBase:
    td["observation"] = normalised(td["observation"])
    return by_observation(td)


def normalising_in_another(td: TensorDictBase) -> TensorDictBase:
    entries = {"observation": td["observation"] / 8 + 3, "action": td["observation"][..., :1] * 1}
    return TensorDict(entries, td.batch_size)


WRITES_WHAT_IT_READS: dict[str, Make] = {
    "counts": lambda env: counting,
    "its last action": lambda env: after_its_last_action,
    "its last action, by keys": as_module(lambda seen, before: (seen + before).sin(), "action"),
    "state at the root": as_module(
        lambda seen, before: ((seen + before).sin(), (seen - before).tanh()), "hidden", "hidden"
    ),
    "state at the root and next": as_module(
        lambda seen, before: ((seen + before).sin(), before + 1, (seen - before).tanh()),
        "hidden",
        "hidden",
        ("next", "hidden"),
    ),
    "state at the root and next, by function": lambda env: with_root_and_next,
    "LSTM": lstm,
    "next alone": lambda env: with_next,
    "observation": normalising(lambda: nn.Linear(3, 1)),
    "observation, by function": lambda env: normalising_the_tensordict,
    "observation, in another TensorDict": lambda env: normalising_in_another,
}

"""Ways to give a policy: each is made for an environment, anew for each side, of equal weights."""

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

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find this file

Make = Callable[[Any], Any]
OBSERVATION = ["observation"]


def by_observation(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", td["observation"][..., :1] * 1)


class Unannounced(TensorDictModuleBase):
    """Says neither what it reads nor what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, data: Any) -> Any:
        return data.set("action", self.net(data["observation"]))


class CalledItself(Unannounced):
    def __call__(self, data: Any) -> Any:
        return self.forward(data)


class Talkative(TensorDictModuleBase):
    """Writes more than it was asked for."""

    def forward(self, data: Any) -> Any:
        one = data["observation"][..., :1]
        return data.update({"action": one * 2, "seen": one.double(), ("a", "b"): one > 0})


class OfItsOwn(TensorDictModuleBase):
    """Returns another TensorDict than it was given, and not all of that."""

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

    act.__annotations__["data"] = TensorDictBase  # as text, TorchRL does not know it
    return act


class Several(nn.Module):
    """Returns the action, and what it likes."""

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
    """What torch returns there is a tuple of a class of its own."""
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

"""Shared parts of the recurrent policy tests: envs, policies, and a plain loop over both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from collect_support import Way, collecting
from echo_envs import EchoEnv
from policy_support import ShapeOnly, box
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

T = 9
LENGTHS = ((3, 1, 4), (2, 5))


def env_fns(worker: int, count: int) -> list[Callable[[], EchoEnv]]:
    return [partial(EchoEnv, 10 * worker + p, LENGTHS[p % 2]) for p in range(count)]


def one(worker: int) -> Any:
    return env_fns(worker, 1)[0]


def three(worker: int) -> Any:
    return env_fns(worker, 3)


# Each policy decides by its state, so that a wrong state also changes the rewards.


class Net(nn.Module):
    """An RNN layer with a head; `call` defines the layout of its state."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, observation: torch.Tensor, *states: torch.Tensor) -> tuple[Any, ...]:
        out, *nexts = self.call(self.layer, observation / 10, *states)
        return (out.sum(-1) > 0).long(), *nexts


def gru_cell(layer: Any, x: Any, h: Any) -> Any:
    h = layer(x, h)
    return h, h


def lstm_cell(layer: Any, x: Any, h: Any, c: Any) -> Any:
    h, c = layer(x, (h, c))
    return h, h, c


def gru_layers_first(layer: Any, x: Any, h: Any) -> Any:
    """Call a GRU with state [*batch, layers, size]."""
    lead = x.shape[:-1]
    out, h = layer(x.reshape(-1, 1, 3), h.reshape(-1, *h.shape[-2:]).transpose(0, 1).contiguous())
    return out.reshape(*lead, -1), h.transpose(0, 1).reshape(*lead, *h.shape[::2])


def lstm_flat(layer: Any, x: Any, h: Any, c: Any) -> Any:
    """Call an LSTM with states [*batch, size]; h is projected to a smaller size than c."""
    lead = x.shape[:-1]
    hidden = (h.reshape(1, -1, h.shape[-1]), c.reshape(1, -1, c.shape[-1]))
    out, (h, c) = layer(x.reshape(-1, 1, 3), hidden)
    return out.reshape(*lead, -1), h.reshape(*lead, -1), c.reshape(*lead, -1)


def module(net: Net, *states: str) -> TensorDictModule:
    return TensorDictModule(
        net, ["observation", *states], ["action", *(("next", key) for key in states)]
    )


def nested(net: Net) -> TensorDictModule:
    key = ("memory", "h")
    return TensorDictModule(net, ["observation", key], ["action", ("next", *key)])


POLICIES: dict[str, tuple[Callable[[], Any], dict[str, tuple[int, ...]]]] = {
    "GRUCell": (lambda: module(Net(nn.GRUCell(3, 4), gru_cell), "h"), {"h": (4,)}),
    "LSTMCell": (
        lambda: module(Net(nn.LSTMCell(3, 4), lstm_cell), "h", "c"),
        {"h": (4,), "c": (4,)},
    ),
    "GRU": (
        lambda: module(Net(nn.GRU(3, 4, 2, batch_first=True), gru_layers_first), "h"),
        {"h": (2, 4)},
    ),
    "LSTM with a projection": (
        lambda: module(Net(nn.LSTM(3, 5, proj_size=2, batch_first=True), lstm_flat), "h", "c"),
        {"h": (2,), "c": (5,)},
    ),
    "float64": (
        lambda: TensorDictSequential(
            TensorDictModule(lambda x: x.double(), ["observation"], ["wide"]),
            TensorDictModule(
                Net(nn.GRUCell(3, 4).double(), gru_cell), ["wide", "h"], ["action", ("next", "h")]
            ),
        ),
        {"h": (4,)},
    ),
}


def seeded(name: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    torch.manual_seed(3)
    make_policy, shapes = POLICIES[name]
    return make_policy(), shapes


class Loop:
    """A plain loop over envs that are stepped together; it computes the expected batches.

    Args:
        fns: the envs.
        policy: called with a TensorDict of the observation, the states and `is_init`.
        initial: the states of one env at a trajectory's first step.
        batched: the policy's input has shape [P, ...]; otherwise it has the only env's shape.
        cut: max_frames_per_traj.
    """

    def __init__(
        self,
        fns: Any,
        policy: Any,
        initial: Mapping[Any, torch.Tensor],
        *,
        batched: bool,
        cut: int = 0,
    ) -> None:
        self.envs = [fn() for fn in fns]
        self.policy, self.initial, self.batched, self.cut = policy, initial, batched, cut
        self.start()

    def start(self) -> None:
        """Reset every env."""
        self.rows = [self.first(env) for env in self.envs]
        self.ages = [0] * len(self.envs)

    def first(self, env: Any) -> TensorDict:
        td = TensorDict({"observation": torch.as_tensor(env.reset()[0])})
        for key, value in self.initial.items():
            td[key] = value.clone()
        return td.set("is_init", torch.ones(1, dtype=torch.bool))

    def rollout(self, steps: int) -> TensorDict:
        """Return [T] or [P, T] frames: observations, actions, and the states that follow."""
        frames = torch.stack([self.step() for _ in range(steps)], -1)
        return frames if self.batched else frames[0]

    def step(self) -> TensorDict:
        seen = torch.stack(self.rows)
        with torch.no_grad():
            out = self.policy(seen.clone() if self.batched else seen[0].clone())
        out = out if self.batched else out.unsqueeze(0)
        rewards = [self.move(p, out[p]) for p in range(len(self.envs))]
        out["next", "reward"] = torch.tensor(rewards)[:, None]
        return out

    def move(self, p: int, out: TensorDict) -> float:
        env = self.envs[p]
        observation, reward, terminated, truncated, _ = env.step(out["action"].item())
        self.ages[p] += 1
        if terminated or truncated or self.ages[p] == self.cut:
            self.rows[p], self.ages[p] = self.first(env), 0
        else:
            row = out["next"].select(*self.initial)
            row["observation"] = torch.as_tensor(observation)
            self.rows[p] = row.set("is_init", torch.zeros(1, dtype=torch.bool))
        return reward


def assert_follows(batch: Any, expected: Any) -> None:
    """Check that the batch has every entry of the model, bit for bit."""
    for key, value in expected.items(True, True):
        if key == "is_init" and batch.get(key, None) is None:
            continue  # the policy does not read it
        assert batch[key].dtype == value.dtype, key
        assert torch.equal(batch[key], value), key


def zeros(shapes: Mapping[Any, tuple[int, ...]], dtype: Any = torch.float32) -> dict[Any, Any]:
    return {key: torch.zeros(shape, dtype=dtype) for key, shape in shapes.items()}


ENTRIES = {"one": (one, 1, False), "list": (three, 3, True), "list of one": (None, 1, True)}


def entry_of(kind: str) -> tuple[Callable[[int], Any], int, bool]:
    entry, count, batched = ENTRIES[kind]
    return entry or (lambda worker: env_fns(worker, 1)), count, batched


class Counter(TensorDictModuleBase):
    """Count its calls in a state without an RNN layer."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = ["observation", "count"]
        self.out_keys = ["action", ("next", "count")]

    def forward(self, td: TensorDict) -> TensorDict:
        td["action"] = (td["count"] % 2).long().squeeze(-1)
        td["next", "count"] = td["count"] + 1
        return td


def boxes(num_envs: int | None = None) -> ShapeOnly:
    return ShapeOnly(box(3), box(2), num_envs)


def plain(*states: str) -> TensorDictModule:
    keys = list(states)
    return TensorDictModule(
        lambda x, *hs: (x[..., :2], *(h + 1 for h in hs)),
        ["observation", *keys],
        ["action", *(("next", key) for key in keys)],
    )


def check_states_follow_the_loop(way: Way, kind: str, name: str) -> None:
    """Check that two batches of a recurrent policy equal a plain loop for each worker."""
    (policy, shapes), (entry, count, batched) = seeded(name), entry_of(kind)
    initial = zeros(shapes, torch.float64 if name == "float64" else torch.float32)
    loops = [Loop(env_fns(w, count), policy, initial, batched=batched) for w in range(way.workers)]
    with collecting(way, entry, policy, frames=T * count) as collector:
        for _ in range(2):
            expected = torch.stack([loop.rollout(T) for loop in loops]).exclude("is_init")
            batch = collector.next().select(*expected.keys(True, True))
            # As dicts, because the batch sizes differ.
            torch.testing.assert_close(batch.to_dict(), expected.to_dict())

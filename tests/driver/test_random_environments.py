"""Frames of random environments, spaces and options equal the environments' own logs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase

from pycollect import SyncDataCollector

LEAVES = st.one_of(
    st.builds(
        lambda shape, dtype: spaces.Box(0, 9, tuple(shape), dtype),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from(["float32", "float64", "float16", "uint8", "int16", "uint32", "int64"]),
    ),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.just(-2)),
    st.builds(lambda nvec: spaces.MultiDiscrete(nvec, start=nvec), st.just([[2, 3], [4, 1]])),
    st.builds(spaces.MultiBinary, st.integers(1, 3)),
)
SPACES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(spaces.Dict, st.dictionaries(st.sampled_from("abc"), inner, min_size=1)),
        st.builds(spaces.Tuple, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=3,
)
OBSERVATIONS = st.one_of(
    SPACES, st.builds(lambda space: spaces.Dict(x=space, text=spaces.Text(4)), SPACES)
)
FORMS: dict[str, Callable[[Any], Any]] = {
    "array": np.array,
    "list": lambda x: x.tolist() if x.size else x,
    "strided": lambda x: np.repeat(x, 2, -1)[..., ::2] if x.ndim else x,
    "swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    "wide": lambda x: x.astype("f8") if x.dtype.kind == "f" else x.astype("i8"),
}
REWARDS: dict[str, Callable[[int], Any]] = {
    "float": float,
    "int": int,
    "array": lambda r: np.array([r]),
    "list": lambda r: [r],
    "tensor": lambda r: torch.tensor([float(r)]),
}


def leaves(space: Any, value: Any, key: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
    """Return the leaves of a value by key, with the keys that a batch should have."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return {key or ("observation",): value}
    named = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    return {k: v for n, child in named for k, v in leaves(child, value[n], (*key, str(n))).items()}


class LoggedEnv(gymnasium.Env[Any, Any]):
    """Logs its resets and steps; its rewards, 1000 * number + step, identify each step."""

    def __init__(self, config: dict[str, Any], log: list[Any], number: int) -> None:
        self.config, self.log, self.number, self.steps = config, log, number, 0
        self.observation_space = deepcopy(config["observation"])
        self.action_space = config["action"]
        self.observation_space.seed(number)
        self.rng = np.random.default_rng(number)
        self.episode, self.left = -1, 0
        if config["reward"] not in ("float", "int"):
            self.reward_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def _observe(self, **event: Any) -> Any:
        value = self.observation_space.sample()
        kept = leaves(self.observation_space, deepcopy(value), ())
        self.log.append({"observation": kept, "episode": self.episode, **event})
        return self._formed(self.observation_space, value)

    def _formed(self, space: Any, value: Any) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._formed(space[key], own) for key, own in value.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(map(self._formed, space.spaces, value))
        if isinstance(space, spaces.Text | spaces.Discrete):
            return value
        return FORMS[self.config["form"]](value)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.left = self.episode + 1, int(self.rng.integers(1, 5))
        return self._observe(), {"note": -1.0}

    def step(self, action: Any) -> Any:
        self.left -= 1
        flags = [bool(flag) for flag in self.rng.permutation([True, self.rng.random() < 0.5])]
        flags = flags if self.left <= 0 else [False, False]
        reward = 1000 * self.number + self.steps
        self.steps += 1
        info = {"note": float(self.steps)} if self.rng.random() < 0.5 else {}
        taken = leaves(self.action_space, deepcopy(action), ("action",))
        observation = self._observe(
            action=taken, reward=reward, flags=flags, note=info.get("note", 0.0)
        )
        return observation, REWARDS[self.config["reward"]](reward), *flags, info


def entry_of(kind: str, config: dict[str, Any], logs: Sequence[list[Any]]) -> Any:
    fns = [partial(LoggedEnv, config, log, number) for number, log in enumerate(logs)]
    if kind in ("one", "list"):
        return fns if kind == "list" else fns[0]
    # Wrapped, because a bare SyncVectorEnv is switched to DISABLED.
    return lambda: VectorWrapper(SyncVectorEnv(fns, autoreset_mode=AutoresetMode[kind]))


def make_policy(space: Any) -> Any:
    space = deepcopy(space)

    def act(tensordict: TensorDictBase) -> TensorDictBase:
        rows = [leaves(space, space.sample(), ("action",)) for _ in range(tensordict.numel())]
        for key in rows[0]:
            values = np.stack([np.asarray(row[key]) for row in rows])
            shape = (*tensordict.shape, *values.shape[1:])
            tensordict[key] = torch.from_numpy(values.reshape(shape))
        return tensordict

    return act


def check_batch(td: Any, logs: Sequence[list[Any]], next_steps: dict[int, int], limit: int) -> None:
    """Check that a batch continues the log of each environment."""
    for frame in td.reshape(-1).unbind(0):
        if frame["collector", "traj_ids"] < 0:
            continue
        number, step = divmod(int(frame["next", "reward"]), 1000)
        places = [i for i, event in enumerate(logs[number]) if "reward" in event]
        root, event = logs[number][places[step] - 1], logs[number][places[step]]
        if number in next_steps:
            assert step == next_steps[number]
        count = sum(e["episode"] == event["episode"] for e in logs[number][: places[step]])
        next_steps[number] = step + 1
        pairs: Any = (((), root["observation"]), (("next",), event["observation"]))
        for lead, values in pairs:
            for key, value in values.items():
                got = frame[lead + key]
                assert got == value if isinstance(value, str) else same(got, value), (number, step)
        for key, value in event["action"].items():
            assert same(frame[key], value), (number, step)
        terminated, truncated = event["flags"]
        assert bool(frame["next", "terminated"]) == terminated
        assert bool(frame["next", "truncated"]) == (truncated or count == limit)
        assert float(frame["next", "note"]) == event["note"]
        assert not limit or int(frame["step_count"]) == count - 1


def same(got: torch.Tensor, value: Any) -> bool:
    array = np.asarray(value)
    return got.numpy().dtype == array.dtype and np.array_equal(got.numpy(), array)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["one", "list", "NEXT_STEP", "SAME_STEP", "DISABLED"]),
    config=st.fixed_dictionaries(
        {
            "observation": OBSERVATIONS,
            "action": SPACES,
            "form": st.sampled_from(list(FORMS)),
            "reward": st.sampled_from(list(REWARDS)),
        }
    ),
    steps=st.integers(1, 7),
    limit=st.sampled_from([0, 0, 1, 3]),
    split=st.booleans(),
    acts=st.booleans(),
)
def test_frames_equal_the_log(
    kind: str, config: dict[str, Any], steps: int, limit: int, split: bool, acts: bool
) -> None:
    if kind not in ("one", "list"):  # limits of SyncVectorEnv; not every mode can reset rows
        limit, config = 0, {**config, "form": "array", "reward": "float"}
    logs: list[list[Any]] = [[] for _ in range(1 if kind == "one" else 2)]
    next_steps: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with SyncDataCollector(
            entry_of(kind, config, logs),
            make_policy(config["action"]) if acts else None,
            frames_per_batch=steps * len(logs),
            max_frames_per_traj=limit,
            split_trajs=split,
            info_keys={"note": torch.float32},
        ) as collector:
            for _ in range(3):
                check_batch(collector.next(), logs, next_steps, limit)

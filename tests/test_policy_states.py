"""Recurrent policies: what they pass on to their own next call, against a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from collect_support import IN_PROCESS, STACK, collecting
from echo_envs import ENTRIES as VECTOR_ENTRIES
from echo_envs import EchoEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_support import ShapeOnly, box, make
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from pycollect import SyncDataCollector
from pycollect.policy import make_policy_runner

T = 9
LENGTHS = ((3, 1, 4), (2, 5))


def env_fns(worker: int, count: int) -> list[Callable[[], EchoEnv]]:
    return [partial(EchoEnv, 10 * worker + p, LENGTHS[p % 2]) for p in range(count)]


def one(worker: int) -> Any:
    return env_fns(worker, 1)[0]


def three(worker: int) -> Any:
    return env_fns(worker, 3)


# Policies. Each one decides by its state, so that a wrong state shows in the rewards too.


class Net(nn.Module):
    """An RNN layer with a head; `call` says how its state is laid out."""

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
    """State [*batch, layers, size]."""
    lead = x.shape[:-1]
    out, h = layer(x.reshape(-1, 1, 3), h.reshape(-1, *h.shape[-2:]).transpose(0, 1).contiguous())
    return out.reshape(*lead, -1), h.transpose(0, 1).reshape(*lead, *h.shape[::2])


def lstm_flat(layer: Any, x: Any, h: Any, c: Any) -> Any:
    """States [*batch, size], where h is projected to another size than c."""
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
    """A plain loop over envs that are stepped together: what the batches have to be.

    Args:
        fns: the envs.
        policy: called with a TensorDict of the observation, the states and `is_init`.
        initial: the states of one env at a trajectory's first step.
        batched: the policy sees [P, ...]; else the only env's own shapes.
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
        """[T] or [P, T]: what was seen and done, and the states that followed."""
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
    """Every entry of the model is in the batch, with its bits."""
    for key, value in expected.items(True, True):
        if key == "is_init" and batch.get(key, None) is None:
            continue  # not read
        assert batch[key].dtype == value.dtype, key
        assert torch.equal(batch[key], value), key


def zeros(shapes: Mapping[Any, tuple[int, ...]], dtype: Any = torch.float32) -> dict[Any, Any]:
    return {key: torch.zeros(shape, dtype=dtype) for key, shape in shapes.items()}


ENTRIES = {"one": (one, 1, False), "list": (three, 3, True), "list of one": (None, 1, True)}


def entry_of(kind: str) -> tuple[Callable[[int], Any], int, bool]:
    entry, count, batched = ENTRIES[kind]
    return entry or (lambda worker: env_fns(worker, 1)), count, batched


@pytest.mark.parametrize("kind", ENTRIES)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("cut", [0, 2])
def test_states_follow_the_loop(kind: str, name: str, cut: int) -> None:
    (policy, shapes), (entry, count, batched) = seeded(name), entry_of(kind)
    initial = zeros(shapes, torch.float64 if name == "float64" else torch.float32)
    loop = Loop(env_fns(0, count), policy, initial, batched=batched, cut=cut)
    with collecting(
        IN_PROCESS, entry, policy, frames=T * count, max_frames_per_traj=cut
    ) as collector:
        for _ in range(3):
            assert_follows(collector.next(), loop.rollout(T))


@pytest.mark.ray
@pytest.mark.parametrize("kind", ["one", "list"])
def test_on_ray(kind: str) -> None:
    (policy, shapes), (entry, count, batched) = seeded("LSTMCell"), entry_of(kind)
    loops = [
        Loop(env_fns(w, count), policy, zeros(shapes), batched=batched)
        for w in range(STACK.workers)
    ]
    with collecting(STACK, entry, policy, frames=T * count) as collector:
        for _ in range(2):
            expected = torch.stack([loop.rollout(T) for loop in loops])
            assert_follows(collector.next(), expected)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3),
    steps=st.integers(1, 7),
    cut=st.integers(0, 4),
    each=st.booleans(),
    flag=st.booleans(),
)
def test_any_schedule_follows_the_loop(
    lengths: list[list[int]], steps: int, cut: int, each: bool, flag: bool
) -> None:
    policy, shapes = seeded("GRUCell")
    fns = [partial(EchoEnv, p, tuple(own)) for p, own in enumerate(lengths)]
    loop = Loop(fns, policy, zeros(shapes), batched=True, cut=cut)
    with SyncDataCollector(
        fns,
        policy,
        frames_per_batch=steps * len(fns),
        max_frames_per_traj=cut,
        reset_at_each_iter=each,
        set_truncated=flag,
    ) as collector:
        for number in range(4):
            if each and number:
                loop.start()
            assert_follows(collector.next(), loop.rollout(steps))


def test_nested_keys() -> None:
    torch.manual_seed(3)
    policy = nested(Net(nn.GRUCell(3, 4), gru_cell))
    loop = Loop(env_fns(0, 3), policy, {("memory", "h"): torch.zeros(4)}, batched=True)
    with collecting(IN_PROCESS, three, policy, frames=3 * T) as collector:
        assert_follows(collector.next(), loop.rollout(T))


def test_set_seed_and_random_frames_begin_states_anew() -> None:
    policy, shapes = seeded("GRUCell")
    env = one(0)()
    with collecting(
        IN_PROCESS, lambda _: env, policy, frames=T, init_random_frames=T, set_truncated=True
    ) as collector:
        random = collector.next()
        assert (random["h"] == 0).all()
        assert (random["next", "h"] == 0).all()
        following = collector.next()
        assert (following["h"][0] == 0).all()
        assert (following["h"][-1] != 0).any() or following["next", "done"][-2]
        collector.set_seed(0)
        loop = Loop([one(0)], policy, zeros(shapes), batched=False)
        loop.envs[0].episode = env.episode - 1
        loop.start()
        assert_follows(collector.next(), loop.rollout(T))


# is_init


def reads_is_init(td: TensorDict) -> TensorDict:
    td["action"] = td["is_init"].squeeze(-1).long()
    return td


def by_name(observation: torch.Tensor, is_init: torch.Tensor) -> torch.Tensor:
    return is_init.squeeze(-1).long()


IS_INIT = {
    "TensorDictModule": TensorDictModule(
        lambda first: first.squeeze(-1).long(), ["is_init"], ["action"]
    ),
    "callable over a TensorDict": reads_is_init,
    "parameter": by_name,
}


@pytest.mark.parametrize("kind", ENTRIES)
@pytest.mark.parametrize("name", IS_INIT)
@pytest.mark.parametrize("cut", [0, 2])
def test_is_init_is_where_trajectories_begin(kind: str, name: str, cut: int) -> None:
    entry, count, _ = entry_of(kind)
    with collecting(
        IN_PROCESS, entry, IS_INIT[name], frames=T * count, max_frames_per_traj=cut
    ) as collector:
        last = None
        for _ in range(3):
            td = collector.next()
            assert td["is_init"].shape == (*td.shape, 1)
            assert torch.equal(td["action"], td["is_init"].squeeze(-1).long())
            ids = td["collector", "traj_ids"].view(count, T)
            before = torch.full((count, 1), -1) if last is None else last
            begins = torch.cat([before, ids], 1).diff() != 0
            assert torch.equal(td["is_init"].view(count, T), begins)
            last = ids[:, -1:]


def test_is_init_is_not_there_unless_it_is_read() -> None:
    policy, _ = seeded("GRUCell")
    with collecting(IN_PROCESS, one, policy, frames=T) as collector:
        assert collector.next().get("is_init", None) is None


# Forms


class Counter(TensorDictModuleBase):
    """Counts its calls in a state without an RNN layer."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = ["observation", "count"]
        self.out_keys = ["action", ("next", "count")]

    def forward(self, td: TensorDict) -> TensorDict:
        td["action"] = (td["count"] % 2).long().squeeze(-1)
        td["next", "count"] = td["count"] + 1
        return td


def count_calls(td: TensorDict) -> TensorDict:
    return Counter()(td)


@pytest.mark.parametrize("policy", [Counter(), count_calls], ids=["module", "callable"])
@pytest.mark.parametrize(
    ("form", "dtype", "first"),
    [
        ((1,), torch.float32, 0),
        (1, torch.float32, 0),
        (torch.tensor([5]), torch.int64, 5),
        (torch.tensor([2.5], dtype=torch.float64), torch.float64, 2.5),
    ],
)
@pytest.mark.parametrize("kind", ENTRIES)
def test_policy_state(policy: Any, form: Any, dtype: Any, first: float, kind: str) -> None:
    entry, count, batched = entry_of(kind)
    loop = Loop(
        env_fns(0, count), Counter(), {"count": torch.tensor([first], dtype=dtype)}, batched=batched
    )
    with collecting(
        IN_PROCESS, entry, policy, frames=T * count, policy_state={"count": form}
    ) as collector:
        for _ in range(2):
            assert_follows(collector.next(), loop.rollout(T))


@pytest.mark.slow
@pytest.mark.ray
def test_policy_state_on_ray() -> None:
    with collecting(
        STACK, three, Counter(), frames=3 * T, policy_state={"count": (1,)}
    ) as collector:
        loops = [
            Loop(env_fns(w, 3), Counter(), {"count": torch.zeros(1)}, batched=True)
            for w in range(STACK.workers)
        ]
        assert_follows(collector.next(), torch.stack([loop.rollout(T) for loop in loops]))


def test_a_shape_alone_takes_the_dtype_that_fits() -> None:
    table = nn.Embedding(7, 2)

    def walk(observation: torch.Tensor, place: torch.Tensor) -> Any:
        return table(place).sum(-1).gt(0).long(), (place + 1) % 7

    policy = TensorDictModule(walk, ["observation", "place"], ["action", ("next", "place")])
    with collecting(
        IN_PROCESS, three, policy, frames=3 * T, policy_state={"place": ()}
    ) as collector:
        td = collector.next()
    assert td["place"].dtype == torch.int64
    assert td["place"].shape == (3, T)


class Spec:
    """What a primer has of a TorchRL spec."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype

    def rand(self) -> torch.Tensor:
        return torch.rand(self.shape, dtype=self.dtype)


class Specs(dict):
    shape = torch.Size([])

    def items(self, *_: Any) -> Any:
        return super().items()


class Primer:
    """What this package reads of a TensorDictPrimer."""

    def __init__(self, specs: Any, default: Any, random: bool = False) -> None:
        self.primers, self.random, self.expand_specs = Specs(specs), random, True
        self.default_value = default


class Primed(Counter):
    def __init__(self, primer: Any) -> None:
        super().__init__()
        self.primer = primer

    def make_tensordict_primer(self) -> Any:
        return self.primer


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_primer_tells_shape_dtype_and_default(kind: str) -> None:
    entry, count, batched = entry_of(kind)
    primer = Primer({"count": Spec(1, dtype=torch.float64)}, {"count": 7.5})
    initial = {"count": torch.tensor([7.5], dtype=torch.float64)}
    loop = Loop(env_fns(0, count), Counter(), initial, batched=batched)
    with collecting(IN_PROCESS, entry, Primed(primer), frames=T * count) as collector:
        assert_follows(collector.next(), loop.rollout(T))


@pytest.mark.parametrize("kind", ENTRIES)
@pytest.mark.parametrize("random", [False, True])
def test_a_primer_that_draws_does_so_for_each_trajectory(kind: str, random: bool) -> None:
    entry, count, _ = entry_of(kind)
    default = {"count": lambda: torch.rand(1)}
    primer = Primer({"count": Spec(1)}, None if random else default, random)
    with collecting(IN_PROCESS, entry, Primed(primer), frames=T * count) as collector:
        td = torch.cat([collector.next().reshape(count, T) for _ in range(4)], 1)
    ids, starts = td["collector", "traj_ids"], []
    for number in ids.unique():
        values = td["count"][ids == number].squeeze(-1)
        assert torch.equal(values, values[0] + torch.arange(len(values))) or torch.allclose(
            values, values[0] + torch.arange(len(values))
        )
        starts.append(values[0].item())
    assert len(set(starts)) == len(starts) > 3


def test_a_primed_state_that_is_not_written_stays() -> None:
    class Reads(Primed):
        def forward(self, td: TensorDict) -> TensorDict:
            td["action"] = td["count"].squeeze(-1).long() % 2
            return td

    policy = Reads(Primer({"count": Spec(1)}, {"count": 3.0}))
    policy.out_keys = ["action"]
    with collecting(IN_PROCESS, three, policy, frames=3 * T) as collector:
        td = collector.next()
    assert (td["count"] == 3).all()
    assert (td["next", "count"] == 3).all()
    assert (td["action"] == 1).all()


def test_private_states_reach_the_policy_alone() -> None:
    policy = TensorDictModule(
        lambda x, h: (h.long() % 2, h + 1), ["observation", "_h"], ["action", ("next", "_h")]
    )
    with collecting(IN_PROCESS, one, policy, frames=T, policy_state={"_h": ()}) as collector:
        td = collector.next()
    assert td["action"].tolist() == [0, 1, 0, 0, 0, 1, 0, 1, 0]  # episodes of 3, 1, 4
    assert not any("_h" in str(key) for key in td.keys(True, True))


def test_frames_of_the_past_as_a_state() -> None:
    """The state is the observation itself, which the env and the recorder write again."""
    policy = TensorDictModule(
        lambda x, before: ((x - before).sum(-1).gt(1).long(), x),
        ["observation", "before"],
        ["action", ("next", "before")],
    )
    with collecting(
        IN_PROCESS, three, policy, frames=3 * T, policy_state={"before": (3,)}
    ) as collector:
        td = collector.next()
    assert torch.equal(td["next", "before"], td["observation"])
    first = td["collector", "traj_ids"].diff(prepend=torch.full((3, 1), -1)) != 0
    assert (td["before"][first] == 0).all()
    assert torch.equal(td["before"][:, 1:][~first[:, 1:]], td["observation"][:, :-1][~first[:, 1:]])


# What is refused


def boxes(num_envs: int | None = None) -> ShapeOnly:
    return ShapeOnly(box(3), box(2), num_envs)


def plain(*states: str) -> TensorDictModule:
    keys = list(states)
    return TensorDictModule(
        lambda x, *hs: (x[..., :2], *(h + 1 for h in hs)),
        ["observation", *keys],
        ["action", *(("next", key) for key in keys)],
    )


@pytest.mark.parametrize("num_envs", [None, 5])
def test_a_state_of_unknown_shape_is_named(num_envs: int | None) -> None:
    with pytest.raises(ValueError, match=r"'memory'.*policy_state=\{'memory': shape\}"):
        make(plain("memory"), boxes(num_envs))


def test_a_callable_that_does_not_say_what_it_reads() -> None:
    def policy(td: TensorDict) -> TensorDict:
        h = td.get("h", torch.zeros(()))
        td["action"] = td["observation"][..., :2]
        return td.set(("next", "h"), h + 1)

    with pytest.raises(ValueError, match=r"'h'.*policy_state"):
        make(policy, boxes())


@pytest.mark.parametrize(
    ("state", "error", "match"),
    [
        ({"other": (1,)}, ValueError, "'other' is no state"),
        ({"memory": "3"}, ValueError, "'memory'"),
        ({"memory": (-1,)}, ValueError, "'memory'"),
        ({"memory": True}, ValueError, "'memory'"),
        ([("memory", (1,))], TypeError, "policy_state"),
    ],
)
def test_bad_policy_state(state: Any, error: type[Exception], match: str) -> None:
    policy = plain("memory")
    with pytest.raises(error, match=match):
        SyncDataCollector(EchoEnv, policy, frames_per_batch=4, policy_state=state)


def test_policy_state_without_a_policy() -> None:
    with pytest.raises(ValueError, match="policy_state"):
        SyncDataCollector(EchoEnv, frames_per_batch=4, policy_state={"h": (1,)})


def test_a_state_that_comes_back_in_another_shape() -> None:
    policy = TensorDictModule(
        lambda x, h: (x[..., :2], h[..., :1]), ["observation", "h"], ["action", ("next", "h")]
    )
    with pytest.raises(ValueError, match=r"'h' was given as torch.float32 \[2\].*\[1\]"):
        SyncDataCollector(
            partial(make_boxes_env), policy, frames_per_batch=4, policy_state={"h": torch.zeros(2)}
        )


def make_boxes_env() -> Any:
    env = EchoEnv()
    env.action_space = box(2)
    return env


def test_a_state_that_changes_its_dtype_later_is_named() -> None:
    calls = []

    def policy(x: torch.Tensor, h: torch.Tensor) -> Any:
        calls.append(0)
        return x[..., 0].long(), h + 1 if len(calls) < 4 else h.double()

    wrapped = TensorDictModule(policy, ["observation", "h"], ["action", ("next", "h")])
    with (
        SyncDataCollector(
            EchoEnv, wrapped, frames_per_batch=4, policy_state={"h": torch.zeros(2)}
        ) as collector,
        pytest.raises(ValueError, match="h"),
    ):
        collector.next()


def test_a_next_output_that_is_not_read_is_recorded_there() -> None:
    policy = TensorDictModule(
        lambda x: (x[..., 2].long() % 2, x.sum(-1)), ["observation"], ["action", ("next", "sum")]
    )
    with collecting(IN_PROCESS, three, policy, frames=3 * T) as collector:
        td = collector.next()
    assert torch.equal(td["next", "sum"], td["observation"].sum(-1))
    assert td.get("sum", None) is None


@pytest.mark.parametrize("key", ["observation", "reward", "done", ("collector", "x")])
def test_a_state_may_not_have_a_key_of_the_batch(key: Any) -> None:
    inner = (key,) if isinstance(key, str) else key
    policy = TensorDictModule(
        lambda x: (x[..., :2], x), ["observation"], ["action", ("next", *inner)]
    )
    with pytest.raises(ValueError, match="policy: the output key"):
        make(policy, boxes(5))


def test_act_returns_outputs_then_next_states() -> None:
    env = boxes(5)
    current = {("observation",): torch.rand(5, 3)}
    runner = make_policy_runner(plain("b", "a"), env, current, policy_state={"a": (), "b": (2,)})
    assert [state.leaf.key for state in runner.states] == [("a",), ("b",)]
    with torch.no_grad():
        action, a, b = runner.act()
    assert torch.equal(action, current["observation",][:, :2])
    assert a.shape == (5,)
    assert b.shape == (5, 2)


VECTOR = ["SyncVectorEnv NEXT_STEP", "SyncVectorEnv SAME_STEP", "ignores masks"]


@pytest.mark.parametrize("kind", VECTOR)
def test_vector_environments(kind: str) -> None:
    """Also where the cell after an episode's end is a dummy: the state begins anew behind it."""
    with collecting(
        IN_PROCESS, VECTOR_ENTRIES[kind], Counter(), frames=3 * T, policy_state={"count": (1,)}
    ) as collector:
        td = torch.cat([collector.next() for _ in range(3)], -1)
    ids = td["collector", "traj_ids"]
    for row, own in zip(ids, td["count"].squeeze(-1), strict=True):
        for number in row[row >= 0].unique():
            counted = own[row == number]
            assert torch.equal(counted, torch.arange(len(counted), dtype=torch.float32))
    dummies = ids < 0
    assert dummies.any() == (kind == "ignores masks")
    assert (td["count"][dummies] == 0).all()
    assert (td["next", "count"][dummies] == 0).all()


class PrivateEnv(EchoEnv):
    """Half of what it shows is for the policy alone."""

    def __init__(self) -> None:
        super().__init__()
        own = self.observation_space
        self.observation_space = gym.spaces.Dict(seen=own, _hidden=own)

    def observe(self) -> Any:
        seen = np.array([self.number, self.episode, self.steps], np.float32)
        return {"seen": seen, "_hidden": 2 * seen}


@pytest.mark.parametrize("entry", [PrivateEnv, [PrivateEnv, PrivateEnv]])
def test_private_observations_reach_the_policy_alone(entry: Any) -> None:
    policy = TensorDictModule(
        lambda seen, hidden: ((hidden - seen)[..., 2].long() % 2, hidden.sum(-1)),
        ["seen", "_hidden"],
        ["action", ("deep", "_sum")],
    )
    with SyncDataCollector(entry, policy, frames_per_batch=2 * T) as collector:
        td = collector.next()
    assert torch.equal(td["action"], td["seen"][..., 2].long() % 2)
    assert not any("_" in part[:1] for key in td.keys(True, True) for part in parts(key))


def parts(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key

"""Shape, dtype and initial value of a policy's state, from an argument or from primers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collect_support import IN_PROCESS, STACK, collecting
from state_support import ENTRIES, Counter, Loop, T, assert_follows, entry_of, env_fns, three
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn


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


def test_with_only_a_shape_the_dtype_is_inferred() -> None:
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
    """The attributes that are read from a TorchRL spec."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype

    def rand(self) -> torch.Tensor:
        return torch.rand(self.shape, dtype=self.dtype)


class Specs(dict):
    shape = torch.Size([])

    def items(self, *_: Any) -> Any:
        return super().items()


class Primer:
    """The attributes that are read from a TensorDictPrimer."""

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
def test_a_primer_defines_shape_dtype_and_default(kind: str) -> None:
    entry, count, batched = entry_of(kind)
    primer = Primer({"count": Spec(1, dtype=torch.float64)}, {"count": 7.5})
    initial = {"count": torch.tensor([7.5], dtype=torch.float64)}
    loop = Loop(env_fns(0, count), Counter(), initial, batched=batched)
    with collecting(IN_PROCESS, entry, Primed(primer), frames=T * count) as collector:
        assert_follows(collector.next(), loop.rollout(T))


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_state_may_be_written_at_the_root_too(kind: str) -> None:
    """The root entry is recorded; the next call reads the entry under "next"."""
    entry, count, _ = entry_of(kind)
    policy = TensorDictModule(
        lambda x, h: (x[..., 2].long() % 2, torch.cat([h, 10 * h], -1), h + 1),
        ["observation", "h"],
        ["action", "h", ("next", "h")],
    )
    with collecting(
        IN_PROCESS, entry, policy, frames=T * count, policy_state={"h": torch.ones(1)}
    ) as collector:
        td = torch.cat([collector.next() for _ in range(2)], -1)
    follows = td["next", "h"] - 1
    assert torch.equal(td["h"], torch.cat([follows, 10 * follows], -1))
    begins = td["collector", "traj_ids"].diff(dim=-1) != 0
    assert torch.equal(td["h"][..., 1:, 0] == 1, begins)


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

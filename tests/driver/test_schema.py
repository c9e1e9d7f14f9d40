"""Contents of a batch: keys, dtypes, shapes, names, device (sections 4 and 5 of the contract)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_0,
    MULTI_ASYNC,
    MULTI_STACK,
    MULTI_TIME,
    STACK,
    Way,
    collecting,
    marked,
    parity_policy,
)
from echo_envs import echo_fns
from envs_for_tests import DiscreteEnv, NestedEnv, PixelEnv
from raising import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

T = 6
WAYS = [IN_PROCESS, *marked(STACK, ASYNC[1], MULTI_STACK, MULTI_0, MULTI_TIME, MULTI_ASYNC[1])]
FLAGS = {"done": (1,), "terminated": (1,), "truncated": (1,)}


def leaves(td: TensorDict) -> dict[Any, torch.Tensor]:
    return dict(td.items(include_nested=True, leaves_only=True))


def assert_schema(td: TensorDict, expected: dict[Any, tuple[Any, tuple[int, ...]]]) -> None:
    """Check that the batch has exactly these keys, with these dtypes and frame shapes."""
    came = leaves(td)
    assert came.keys() == expected.keys()
    for key, (dtype, frame) in expected.items():
        assert came[key].dtype == dtype, key
        assert came[key].shape == (*td.shape, *frame), key


def common(
    observation: dict[Any, Any], policy: dict[Any, Any], **options: bool
) -> dict[Any, tuple[Any, tuple[int, ...]]]:
    """Return section 4's table for these observation leaves and policy outputs."""
    as_tuple = {key if isinstance(key, tuple) else (key,): v for key, v in observation.items()}
    table = {**observation, **policy}
    table.update({("next", *key): value for key, value in as_tuple.items()})
    for flag, shape in FLAGS.items():
        table[flag] = table["next", flag] = (torch.bool, shape)
    table["next", "reward"] = (torch.float32, (1,))
    table["collector", "traj_ids"] = (torch.int64, ())
    if options.get("step_count"):
        table["step_count"] = table["next", "step_count"] = (torch.int64, (1,))
    if options.get("policy_version"):
        table["collector", "policy_version"] = (torch.int64, ())
    return table


PLAIN = {"observation": (torch.float32, (3,))}
PARITY = {"action": (torch.int64, ()), "seen": (torch.float32, (3,))}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("optional", [False, True])
def test_plain_batch(batched: bool, optional: bool) -> None:
    entry = (lambda w: echo_fns(w)) if batched else (lambda w: echo_fns(w)[0])
    arguments: dict[str, Any] = {}
    if optional:
        arguments = {"max_frames_per_traj": 4, "track_policy_version": True, "device": "cpu"}
    frames = 3 * T if batched else T
    with collecting(IN_PROCESS, entry, parity_policy(), frames=frames, **arguments) as collector:
        td = collector.next()
    assert td.shape == ((3, T) if batched else (T,))
    assert td.names == [*([None] if batched else []), "time"]
    assert td["next"].names == td.names
    assert td.device == (torch.device("cpu") if optional else None)
    assert_schema(td, common(PLAIN, PARITY, step_count=optional, policy_version=optional))


NESTED = {
    "count": (torch.float32, (3,)),
    ("pair", "0"): (torch.int64, ()),
    ("pair", "1"): (torch.int8, (4,)),
    ("deep", "er"): (torch.int64, (2, 2)),
}
NESTED_ACTION = {
    ("action", "move"): (torch.float32, (2,)),
    ("action", "press", "0"): (torch.int64, ()),
    ("action", "press", "1"): (torch.int8, (2,)),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_nested_spaces(way: Way) -> None:
    def entry(worker: int) -> Any:
        return [partial(NestedEnv, number=10 * worker + p, length=4) for p in range(2)]

    arguments = {"track_policy_version": True, "storing_device": "cpu", "max_frames_per_traj": 3}
    with collecting(way, entry, None, frames=2 * T, **arguments) as collector:
        td = collector.next()
    assert td.shape == way.shape(2, True, T)
    assert td.names == [*[None] * (td.ndim - 1), "time"]
    assert td.device == torch.device("cpu")
    assert_schema(td, common(NESTED, NESTED_ACTION, step_count=True, policy_version=True))
    step = td["step_count"].squeeze(-1)
    assert torch.equal(td["pair", "0"], step)
    assert torch.equal(td["next", "pair", "0"], step + 1)
    assert torch.equal(td["deep", "er"][..., 1, 1], step)
    assert torch.equal(td["pair", "1"][..., 2].long(), step % 2)
    assert set(td["action", "press", "0"].flatten().tolist()) <= {1, 2, 3}


def test_discrete_spaces_with_a_start() -> None:
    with collecting(IN_PROCESS, lambda w: partial(DiscreteEnv, length=4), frames=40) as collector:
        td = collector.next()
    observation = {"observation": (torch.int64, ())}
    assert_schema(td, common(observation, {"action": (torch.int64, ())}))
    assert td["observation"][:5].tolist() == [-3, -2, -1, 0, -3]
    assert td["next", "observation"][:5].tolist() == [-2, -1, 0, 1, -2]
    assert set(td["action"].tolist()) == {5, 6, 7}


def test_private_keys_are_not_delivered() -> None:
    def act(observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (observation[..., 2] % 2).long(), observation * 2, observation * 3

    policy = TensorDictModule(act, ["observation"], ["action", "_hidden", ("extra", "_deep")])
    with collecting(IN_PROCESS, lambda w: echo_fns(w)[0], policy, frames=T) as collector:
        assert_schema(collector.next(), common(PLAIN, {"action": (torch.int64, ())}))


@pytest.mark.parametrize("count", [1, 3])
def test_pixels(count: int) -> None:
    def entry(worker: int) -> Any:
        return [partial(PixelEnv, number=p, length=3 + p) for p in range(count)]

    with collecting(IN_PROCESS, entry, frames=count * T) as collector:
        td = collector.next()
    for p in range(count):
        steps = torch.arange(T) % (3 + p)
        assert (td["observation"][p] == steps[:, None, None, None]).all()
        assert (td["next", "observation"][p] == steps[:, None, None, None] + 1).all()


@pytest.mark.parametrize("change", ["dtype", "shape", "keys"])
def test_a_policy_that_changes_its_outputs(change: str) -> None:
    calls = []

    def act(td: Any) -> Any:
        calls.append(1)
        late = len(calls) > 3
        extra = torch.zeros(5 if late and change == "shape" else 4)
        td["extra"] = extra.double() if late and change == "dtype" else extra
        if late and change == "keys":
            td["another"] = extra
        return td.set("action", torch.zeros((), dtype=torch.int64))

    named = "another" if change == "keys" else "extra"
    with (
        collecting(IN_PROCESS, lambda w: echo_fns(w)[0], act, frames=T) as collector,
        pytest.raises(ValueError, match=named),
    ):
        collector.next()


class OfDict(torch.nn.Module):
    """Calls a layer with a TensorDict in a way that the collector cannot take apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)

    def forward(self, tensordict: Any) -> Any:
        logits = self.inner(tensordict["observation"])
        return tensordict.update({"logits": logits, "action": logits.argmax(-1)})


class Logits(torch.nn.Module):
    """The same over tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)

    def forward(self, observation: torch.Tensor) -> Any:
        logits = self.inner(observation)
        return {"logits": logits, "action": logits.argmax(-1)}


@pytest.mark.parametrize("entered", [True, False], ids=["entered", "left"])
@pytest.mark.parametrize("policy", [Logits, OfDict])
def test_an_output_whose_dtype_changes_by_autocast(policy: Any, entered: bool) -> None:
    """The error names the key and autocast; collecting goes on with autocast as before."""
    torch.manual_seed(0)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=not entered),
        collecting(IN_PROCESS, lambda w: echo_fns(w)[0], policy(), frames=T) as collector,
    ):
        assert collector.next()["logits"].dtype is (torch.float32 if entered else torch.bfloat16)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=entered),
            refused(ValueError, "policy") as caught,
        ):
            collector.next()
    assert "'logits'" in str(caught.value)
    assert "torch.autocast" in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        *("done", "collector", "step_count", ("next", "reward"), ("next", "observation")),
        *((name, "x") for name in ("collector", "action", "observation")),
    ],
)
def test_outputs_that_are_the_collectors_own(key: Any) -> None:
    policy = TensorDictModule(
        lambda o: ((o[..., 2] % 2).long(), o.clone()), ["observation"], ["action", key]
    )
    name = key if isinstance(key, str) else key[-1]
    with refused(ValueError, "policy") as caught:
        collecting(IN_PROCESS, lambda w: echo_fns(w)[0], policy, frames=T).__enter__()
    assert name in str(caught.value)

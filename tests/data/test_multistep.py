"""`MultiStep` against a naive model, over layouts, ids, masks and kinds of leaves."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from arrays_for_tests import batch_shapes
from hypothesis import given
from hypothesis import strategies as st
from raising import refused
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from pycollect import MultiStep, split_trajectories

FLAGS = ("done", "terminated", "truncated")


def make(
    shape: tuple[int, ...], seed: int, *, ids: bool = True, mask: bool = False, done: float = 0.2
) -> TensorDict:
    """Return a batch with data in its uncollected cells, which must not be read."""
    g = torch.Generator().manual_seed(seed)

    def flags() -> torch.Tensor:
        return torch.rand((*shape, 1), generator=g) < done

    terminated, truncated = flags(), flags()
    td = TensorDict(
        {
            "observation": torch.randn((*shape, 3), generator=g),
            "next": {
                "observation": {
                    "pixels": torch.randint(0, 255, (*shape, 2, 3), dtype=torch.uint8, generator=g),
                    "nothing": torch.zeros((*shape, 0)),
                },
                "half": torch.randn(shape, generator=g).bfloat16(),
                "reward": torch.randn((*shape, 1), generator=g),
                "done": terminated | truncated,
                "terminated": terminated,
                "truncated": truncated,
            },
            "collector": {},
        },
        batch_size=shape,
    )
    if ids:
        td["collector", "traj_ids"] = torch.randint(-1, 3, shape, generator=g).sort(-1).values
    if mask:
        td["collector", "mask"] = torch.rand(shape, generator=g) < 0.8
    td["next", "reward"][~collected(td)] = torch.nan
    return td


def collected(td: TensorDict) -> torch.Tensor:
    here = td.get(("collector", "mask"), torch.ones(td.shape, dtype=torch.bool))
    ids = td.get(("collector", "traj_ids"), None)
    return here if ids is None else here & (ids != -1)


def looks_ahead(td: TensorDict, cell: tuple[int, ...], n: int) -> list[tuple[int, ...]]:
    """Return the cells that add to the reward of one cell, as docs/contract.md defines them."""
    here, ids = collected(td), td.get(("collector", "traj_ids"), None)
    if not here[cell]:
        return []
    *row, t = cell
    cells = [cell]
    while len(cells) < n and not td["next", "done"][cells[-1]].any() and t + 1 < td.shape[-1]:
        t += 1
        after = (*row, t)
        if not here[after] or (ids is not None and ids[after] != ids[cell]):
            break
        cells.append(after)
    return cells


def check(td: TensorDict, out: TensorDict, n: int, gamma: float, shift_done: bool = True) -> None:
    """Check every leaf, cell by cell."""
    added = {"steps_to_next_obs", "gamma", "nonterminal", ("next", "original_reward")}
    assert set(out.keys(True, True)) == set(td.keys(True, True)) | added
    assert out.shape == td.shape
    moved = (
        set(td.get("next").keys(True, True)) - {"reward"} - (set() if shift_done else set(FLAGS))
    )
    for cell in np.ndindex(tuple(td.shape)):
        cells = looks_ahead(td, cell, n)
        for key in moved:
            wanted = td.get("next").get(key)[cells[-1] if cells else cell]
            assert torch.equal(out.get("next").get(key)[cell], wanted), (key, cell)
        rewards = [float(td["next", "reward"][at]) for at in cells]
        total = sum(gamma**k * reward for k, reward in enumerate(rewards))
        assert out["next", "reward"][cell].item() == pytest.approx(total, rel=1e-6, abs=1e-6)
        assert out["steps_to_next_obs"][cell] == len(cells)
        assert out["gamma"][cell].item() == pytest.approx(gamma ** len(cells))
        assert bool(out["nonterminal"][cell]) == (len(looks_ahead(td, cell, 2)) == 2)
    unmoved = set(td.keys(True, True)) - {("next", "reward")}
    unmoved -= {("next", *((key,) if isinstance(key, str) else key)) for key in moved}
    for key in unmoved:
        assert torch.equal(out[key], td[key]), key
    torch.testing.assert_close(
        out["next", "original_reward"], td["next", "reward"], rtol=0, atol=0, equal_nan=True
    )


@given(
    batch_shapes,
    st.integers(0, 2**32),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 3, 5, 100]),
    st.booleans(),
)
def test_every_frame_looks_n_steps_ahead(
    shape: tuple[int, ...], seed: int, ids: bool, mask: bool, n: int, shift_done: bool
) -> None:
    td = make(shape, seed, ids=ids, mask=mask)
    before = td.clone()
    out = MultiStep(0.9, n, shift_done)(td)
    check(before, out, n, 0.9, shift_done)
    assert set(td.keys(True, True)) == set(before.keys(True, True))
    for key, leaf in before.items(True, True):  # the input is unchanged
        torch.testing.assert_close(td[key], leaf, rtol=0, atol=0, equal_nan=True)


@given(batch_shapes, st.integers(0, 2**32))
def test_the_same_before_and_after_splitting(shape: tuple[int, ...], seed: int) -> None:
    td = make(shape, seed)
    step = MultiStep(0.9, 3, shift_done=False)  # shifted dones would cut earlier
    after = step(split_trajectories(td))
    before = split_trajectories(step(td))
    assert set(after.keys(True, True)) == set(before.keys(True, True))
    padded = ~after["collector", "mask"]
    before["gamma"][padded] = 1.0  # no step ahead
    for key, leaf in before.items(True, True):
        assert torch.equal(after[key], leaf), key
    padding = after[padded]
    assert not padding["next", "reward"].any()


@given(
    batch_shapes,
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from([1, 2, 5]),
    st.integers(2, 4),
)
def test_each_objective_is_summed_by_itself(
    shape: tuple[int, ...], seed: int, mask: bool, n: int, objectives: int
) -> None:
    td = make(shape, seed, mask=mask)
    one = td["next", "reward"]
    rewards = [one.roll(k, -1) * 2.0**k - k for k in range(objectives)]
    td["next", "reward"] = torch.cat(rewards, -1)
    summed = MultiStep(0.9, n)(td)["next", "reward"]
    assert summed.shape == (*shape, objectives)
    for k in range(objectives):
        own = td.clone().set(("next", "reward"), rewards[k])
        assert torch.equal(summed[..., k : k + 1], MultiStep(0.9, n)(own)["next", "reward"])
    for cell in np.ndindex(shape):
        plain = torch.zeros(objectives, dtype=torch.float64)
        for k, at in enumerate(looks_ahead(td, cell, n)):
            plain += 0.9**k * td["next", "reward"][at]
        torch.testing.assert_close(summed[cell].double(), plain, rtol=1e-5, atol=1e-5)
    by_torch = td.clone()
    by_torch["next", "reward"].requires_grad_()
    torch.testing.assert_close(
        MultiStep(0.9, n)(by_torch)["next", "reward"], summed, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.bool])
def test_rewards_of_any_type(dtype: torch.dtype) -> None:
    td = make((6,), 0, ids=False, done=0.0)
    td["next", "reward"] = torch.tensor([[1], [0], [1], [1], [0], [1]]).to(dtype)
    out = MultiStep(0.5, 3)(td)
    wanted = torch.tensor([1.25, 0.75, 1.5, 1.25, 0.5, 1.0]).unsqueeze(-1)
    assert out["next", "reward"].dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert torch.equal(out["next", "reward"].float(), wanted)
    assert out["next", "original_reward"].dtype == dtype


def test_rewards_and_dones_of_groups() -> None:
    reward = torch.arange(12.0).reshape(4, 3, 1)
    done = torch.zeros(4, 3, 1, dtype=torch.bool)
    done[1, 2] = True  # one agent of three is done: the segment ends for all
    td = TensorDict({}, [4])
    td["next"] = TensorDict({"flag": torch.arange(4)}, [4])
    td["next", "agents"] = TensorDict({"reward": reward, "done": done}, [4, 3])
    td["next", "others"] = TensorDict({"reward": reward[:, :2] * 10}, [4])
    out = MultiStep(1.0, 2)(td)
    assert out["steps_to_next_obs"].tolist() == [2, 1, 2, 1]
    assert out["next", "agents"].batch_size == (4, 3)
    wanted = torch.stack([reward[0] + reward[1], reward[1], reward[2] + reward[3], reward[3]])
    assert torch.equal(out["next", "agents", "reward"], wanted)
    assert torch.equal(out["next", "agents", "original_reward"], reward)
    assert torch.equal(out["next", "others", "reward"], wanted[:, :2] * 10)
    assert torch.equal(out["next", "agents", "done"], done[[1, 1, 3, 3]])
    assert out["next", "flag"].tolist() == [1, 1, 3, 3]


def test_rewards_can_be_named() -> None:
    td = make((4,), 0, ids=False, done=0.0)
    td["next", "cost"] = torch.ones(4, 1)
    out = MultiStep(1.0, 4, reward_keys=["cost"])(td)
    assert out["next", "cost"].squeeze(-1).tolist() == [4, 3, 2, 1]
    assert torch.equal(out["next", "reward"], td["next", "reward"][[3, 3, 3, 3]])


def test_ids_without_dones_end_segments() -> None:
    td = TensorDict({"next": {"reward": torch.ones(5), "x": torch.arange(5)}}, [5])
    td["collector", "traj_ids"] = torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)
    out = MultiStep(1.0, 10)(td)
    assert out["next", "reward"].tolist() == [2, 1, 3, 2, 1]
    assert out["next", "x"].tolist() == [1, 1, 4, 4, 4]


def test_any_strides() -> None:
    td = make((4, 3, 10), 2)
    for view in (td.permute(1, 0, 2), td[:, 1], td[..., ::2], td[0, 0].expand(3, 10)):
        check(view, MultiStep(0.9, 3)(view), 3, 0.9)
    stacked = LazyStackedTensorDict(*td.unbind(0), stack_dim=0)
    check(td, MultiStep(0.9, 3)(stacked), 3, 0.9)


def test_objects_move_with_their_frames() -> None:
    td = make((2, 3), 0, ids=False, done=0.0)
    td["next", "text"] = NonTensorStack(NonTensorStack(*"abc"), NonTensorStack(*"def"))
    td["next", "one"] = NonTensorData("the same everywhere", batch_size=[2, 3])
    td["text"] = NonTensorStack(NonTensorStack(*"uvw"), NonTensorStack(*"xyz"))
    out = MultiStep(0.9, 2)(td)
    assert out.get(("next", "text")).tolist() == [["b", "c", "c"], ["e", "f", "f"]]
    assert out.get(("next", "one")).tolist() == [["the same everywhere"] * 3] * 2
    assert out.get("text").tolist() == [["u", "v", "w"], ["x", "y", "z"]]
    assert td.get(("next", "text")).tolist() == [["a", "b", "c"], ["d", "e", "f"]]


def test_ragged_leaves_move_with_their_frames() -> None:
    steps = [
        TensorDict(
            {
                "next": {
                    "ragged": torch.arange(t),
                    "reward": torch.ones(1),
                    "done": torch.zeros(1) > 0,
                }
            }
        )
        for t in range(4)
    ]
    td = LazyStackedTensorDict(*steps, stack_dim=0)
    out = MultiStep(1.0, 3)(td)
    assert [out[t]["next", "ragged"].tolist() for t in range(4)] == [[0, 1], *[[0, 1, 2]] * 3]
    assert out["next", "reward"].squeeze(-1).tolist() == [3, 3, 2, 1]


def test_gradients_pass() -> None:
    td = make((2, 6), 1)
    reward = td["next", "reward"].nan_to_num().requires_grad_()
    value = torch.randn(2, 6, 2, requires_grad=True)
    td["next", "reward"], td["next", "value"] = reward * 1, value * 2
    out = MultiStep(0.9, 3)(td)
    with torch.no_grad():
        plain = MultiStep(0.9, 3)(td)
    torch.testing.assert_close(out["next", "reward"], plain["next", "reward"])
    assert torch.equal(out["next", "value"], plain["next", "value"])
    out["next", "reward"].sum().backward()
    out["next", "value"].sum().backward()
    assert reward.grad[collected(td)].min() >= 1.0
    assert not reward.grad[~collected(td)].any()
    assert value.grad.sum() == 2 * value.numel()


def test_memory_of_a_result_is_reused_only_after_its_release() -> None:
    td = make((2, 8), 3)
    step = MultiStep(0.9, 3)
    view = step(td)["next", "observation", "pixels"][1:]
    kept = view.clone()
    for seed in range(10):
        step(make((2, 8), seed))
    assert torch.equal(view, kept)


def test_names_stay() -> None:
    td = make((2, 6), 0)
    td.names = ["worker", "time"]
    out = MultiStep(0.9, 3)(td)
    assert out.names == ["worker", "time"]
    assert out["next"].names == ["worker", "time"]


def test_a_module() -> None:
    step = pickle.loads(pickle.dumps(MultiStep(0.9, 3, shift_done=False)))
    assert repr(step) == "MultiStep(gamma=0.9, n_steps=3, shift_done=False)"
    assert step.to("cpu") is step
    td = make((6,), 0)
    seen: list[object] = []
    step.register_forward_hook(lambda *call: seen.append(call[-1]))
    out = torch.nn.Sequential(step)(td)
    assert seen == [out]
    assert torch.equal(out["gamma"], step.forward(td)["gamma"])


def test_keys_can_be_set() -> None:
    td = make((6,), 0, done=0.0).exclude("collector")
    td["next", "over"] = torch.tensor([0, 1, 0, 0, 0, 0], dtype=torch.bool)
    td["next", "cost"] = torch.ones(6)
    td["kept"] = torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.bool)
    step = MultiStep(1.0, 3)
    step.reward_keys, step.done_key, step.mask_key = ["cost"], "over", "kept"
    out = step(td)
    assert out["next", "cost"].tolist() == [2, 1, 3, 2, 1, 0]
    assert out["next", "over"].tolist() == [True, True, False, False, False, False]
    step.shift_done, step.done_keys = False, ("over",)
    assert torch.equal(step(td)["next", "over"], td["next", "over"])
    step.done_key = "nothing"
    with refused(KeyError, "done_key"):
        step(td)


@pytest.mark.parametrize("last", [(3,), (3, 1), (2, 3)])
def test_flags_of_a_frame_end_trajectories_of_their_own(last: tuple[int, ...]) -> None:
    """If all leaves have the flags' dimensions, each flag is processed as its own batch."""
    g = torch.Generator().manual_seed(0)
    shape = (2, 8, *last)
    td = TensorDict(
        {
            "x": torch.randn(*shape, 2, generator=g),
            "next": {
                "deep": {"x": torch.randn(*shape, 2, generator=g)},
                "reward": torch.randn(shape, generator=g),
                "done": torch.rand(shape, generator=g) < 0.3,
            },
        },
        (2, 8),
        names=[None, "time"],
    )
    step = MultiStep(0.9, 3)
    out = step(td)
    assert out.batch_size == (2, 8)
    assert out.names == [None, "time"]
    assert out["next"].batch_size == out["next", "deep"].batch_size == (2, 8)
    for flag in np.ndindex(last):
        at = (slice(None), slice(None), *flag)
        alone = step(TensorDict(td.apply(lambda leaf, at=at: leaf[at]), (2, 8)))
        for key, leaf in alone.items(True, True):
            assert torch.equal(out[key][at], leaf), key
    assert td["next"].batch_size == (2, 8)
    wide = td.clone()
    wide["state"] = torch.zeros(2, 8, 4)  # lacks the flags' dimensions: all flags share segments
    together = step(wide)["steps_to_next_obs"]
    assert together.shape == (2, 8)
    assert not torch.equal(together, out["steps_to_next_obs"].flatten(2)[..., 0])


def test_bad_input_is_named() -> None:
    with refused(ValueError, "gamma"):
        MultiStep(0, 3)
    for wrong, error in ((0, ValueError), (2.5, TypeError), ("2", TypeError), (None, TypeError)):
        with refused(error, "n_steps"):
            MultiStep(0.9, wrong)
    with refused(TypeError, "gamma"):
        MultiStep("0.9", 3)  # type: ignore[arg-type]
    with refused(TypeError, "shift_done"):
        MultiStep(0.9, 3, "no")  # type: ignore[arg-type]
    step = MultiStep(0.9, 3)
    td = make((6,), 0)
    with refused(ValueError, "tensordict"):
        step(td[0])
    with refused(KeyError, "tensordict") as caught:
        step(td.exclude("next"))
    assert '"next"' in str(caught.value)
    with refused(KeyError, "reward_keys") as caught:
        step(td.exclude(("next", "reward")))
    assert "observation.pixels" in str(caught.value)
    with refused(KeyError, "reward_keys") as caught:
        MultiStep(0.9, 3, reward_keys=["cost"])(td)
    assert "next.cost" in str(caught.value)
    with refused(KeyError, "tensordict") as caught:
        step(td.exclude("collector", *(("next", flag) for flag in FLAGS)))
    assert "next.done" in str(caught.value)
    td["next", "sparse"] = torch.ones(6, 2).to_sparse()
    with refused(TypeError, "sparse"):
        step(td)

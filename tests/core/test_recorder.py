"""The Recorder: errors, and the recording of single steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from raising import refused

from pycollect._core import Leaf, Placement, Recorder, SlabPool
from pycollect.data.frame import BatchLeaves
from pycollect.data.slabs import slab_tensors


def simple(envs: int = 2, **options: Any) -> tuple[Recorder, SlabPool]:
    leaves = BatchLeaves(
        observation=(Leaf(("observation",), "float32", (3,)),),
        outputs=(Leaf(("action",), "int64", ()),),
    )
    recorder = Recorder(
        leaves.layout(),
        [(("observation",), torch.zeros(envs, 3), True)],
        [("action",)],
        envs=envs,
        batched=True,
        **options,
    )
    return recorder, SlabPool(Placement(leaves.layout(), 1, envs, 2), 1)


def good(envs: int = 2) -> dict[str, Any]:
    return {
        "observation": np.zeros((envs, 3), np.float32),
        "reward": np.zeros(envs),
        "terminated": np.zeros(envs, bool),
        "truncated": np.zeros(envs, bool),
        "outputs": (torch.zeros(envs, dtype=torch.int64),),
    }


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("observation", np.zeros((2, 4), np.float32), "next.observation"),
        ("observation", np.zeros(3, np.float32), "next.observation"),
        ("observation", np.zeros((3, 3), np.float32), "next.observation"),
        ("observation", np.zeros((2, 3), np.complex64), "next.observation"),
        ("observation", (np.zeros((2, 3), np.float32),) * 2, "observation"),
        ("reward", np.zeros(3), "reward"),
        ("terminated", np.zeros((2, 2), bool), "terminated"),
        ("truncated", np.zeros(1, bool), "truncated"),
        ("outputs", (torch.zeros(3, dtype=torch.int64),), "action"),
        ("outputs", (torch.zeros(2),), "action"),
        ("outputs", (), "outputs"),
    ],
)
def test_a_step_that_does_not_fit(name: str, value: Any, named: str) -> None:
    recorder, pool = simple()
    recorder.restart(np.zeros((2, 3), np.float32))
    recorder.begin(pool.acquire(), 0, 0)
    with refused((ValueError, TypeError), named):
        recorder.step(**{**good(), name: value})
    for _ in range(2):
        recorder.step(**good())
    with refused(TypeError, "beside"):
        recorder.finish(0, 0, 0, beside=[None])
    assert recorder.finish(0, 0, 0).frames == 4


def single(**options: Any) -> tuple[Recorder, Any]:
    """Return a recorder of one env with rollouts of three steps, and its slab."""
    leaves = BatchLeaves(
        observation=(Leaf(("observation",), "float32", (3,)),),
        outputs=(Leaf(("action",), "int64", ()),),
    )
    recorder = Recorder(
        leaves.layout(),
        [(("observation",), torch.zeros(3), True)],
        [("action",)],
        envs=1,
        batched=False,
        **options,
    )
    recorder.restart(np.zeros(3, np.float32))
    slab = SlabPool(Placement(leaves.layout(), 1, 1, 3), 1).acquire()
    recorder.begin(slab, 0, 0)
    return recorder, slab


def test_the_env_gets_its_own_copy_of_the_action() -> None:
    recorder, slab = single(given=[0])
    for number in range(3):
        chosen = torch.tensor(number)
        action = recorder.take((chosen,))
        assert (type(action), action.dtype, action.shape) == (np.ndarray, np.int64, ())
        assert action == number
        action[...] = 99
        recorder.record((np.full(3, number, np.float32), 1.0, False, False))
    recorder.finish(0, 0, 0)
    tensors = slab_tensors(slab, [3])
    assert tensors[("action",)].tolist() == [0, 1, 2]


class CapsuleTensor:
    """A tensor of an older torch: it exports DLPack capsules and converts to a number."""

    def __init__(self, values: Any) -> None:
        self.tensor = torch.as_tensor(values)

    def __dlpack__(self) -> Any:
        return self.tensor.__dlpack__()

    def __index__(self) -> int:
        return self.tensor.__index__()

    def __float__(self) -> float:
        return float(self.tensor)


def test_a_tensor_that_only_exports_capsules_is_not_read_as_a_number() -> None:
    recorder, slab = single(given=[0, 1])
    for number in range(3):
        chosen, scores = recorder.take((CapsuleTensor(number), CapsuleTensor([0.5, 1.5])))
        assert (chosen.dtype, chosen.tolist()) == (np.int64, number)
        assert (scores.dtype, scores.tolist()) == (np.float32, [0.5, 1.5])
        recorder.record((CapsuleTensor([1.0, 2.0, 3.0]), CapsuleTensor(0.25), False, False))
    recorder.finish(0, 0, 0)
    tensors = slab_tensors(slab, [3])
    assert tensors[("action",)].tolist() == [0, 1, 2]
    assert tensors[("next", "observation")].tolist() == [[1.0, 2.0, 3.0]] * 3
    assert tensors[("next", "reward")].tolist() == [[0.25]] * 3


def test_an_env_may_get_numpy_scalars_and_unrecorded_actions() -> None:
    recorder, _ = single(given=[0], scalars=True)
    assert type(recorder.take((torch.tensor(3),))) is np.int64
    recorder, _ = single(given=[1, 0])
    beside, action = recorder.take((torch.tensor(3), np.ones(2, np.float16)))
    assert (beside.dtype, beside.tolist(), action) == (np.float16, [1, 1], 3)
    assert single()[0].take((torch.tensor(3),)) == ()


def test_only_unexpected_arrays_of_an_env_are_converted() -> None:
    asked = []

    def convert(value: Any) -> np.ndarray:
        asked.append(value)
        return np.asarray(value, np.float32)

    recorder, slab = single(given=[0], convert=convert)
    for value in (np.ones(3, np.float32), [2.0, 2.0, 2.0], np.full(3, 3.0)):
        recorder.take((torch.tensor(0),))
        recorder.record([value, np.float32(1.5), np.True_, np.False_, {}])
        recorder.reset(np.zeros(3, np.float32))
    recorder.finish(0, 0, 0)
    assert [type(value) for value in asked] == [list, np.ndarray]
    tensors = slab_tensors(slab, [3])
    assert tensors[("next", "observation")][:, 0].tolist() == [1, 2, 3]
    assert tensors[("next", "reward")].flatten().tolist() == [1.5] * 3
    assert tensors[("next", "terminated")].all()


def test_a_step_result_needs_five_entries() -> None:
    recorder, _ = single(given=[0], convert=np.asarray)
    recorder.take((torch.tensor(0),))
    with pytest.raises(ValueError, match="step"):
        recorder.record((np.zeros(3, np.float32), 1.0, False, {}))
    recorder, _ = single(given=[0])
    with refused(RuntimeError, "record") as caught:
        recorder.record((np.zeros(3, np.float32), 1.0, False, False))
    assert "take()" in str(caught.value)
    with refused(ValueError, "values"):
        recorder.take(())
    recorder.abandon()


def test_arrays_of_a_changing_form_are_read_correctly() -> None:
    """Facts cached from the previous array are only a shortcut."""
    recorder, slab = single()
    base = np.arange(12, dtype=np.float32)
    forms = (base[:3], base[::4], base[:3].astype(np.float64))
    outs = (torch.tensor(1), np.array(2), torch.tensor([5, 3])[1])
    for observation, out in zip(forms, outs, strict=True):
        recorder.step(observation, 0.0, False, False, (out,))
    recorder.finish(0, 0, 0)
    tensors = slab_tensors(slab, [3])
    assert tensors[("next", "observation")].tolist() == [[0, 1, 2], [0, 4, 8], [0, 1, 2]]
    assert tensors[("action",)].tolist() == [1, 2, 3]


@pytest.mark.parametrize("refusal", ["lazy", "freed"])
def test_an_unreadable_tensor_is_refused_even_after_a_plain_one(refusal: str) -> None:
    leaves = BatchLeaves(observation=(), outputs=(Leaf(("value",), "float32", ()),))
    recorder = Recorder(leaves.layout(), [], [("value",)], envs=1, batched=False)
    recorder.restart(())
    recorder.begin(SlabPool(Placement(leaves.layout(), 1, 1, 3), 1).acquire(), 0, 0)
    recorder.step((), 0.0, False, False, (torch.tensor(1.0),))
    tensor = torch.tensor(1 + 2j, dtype=torch.complex64).conj().imag
    assert tensor.is_neg()
    if refusal == "freed":
        tensor = torch.tensor(1.0)
        tensor.untyped_storage().resize_(0)
    with refused(ValueError, "outputs"):
        recorder.step((), 0.0, False, False, (tensor,))


def test_nan_and_extreme_numbers_pass_unchanged() -> None:
    recorder, pool = simple()
    values = np.array([[np.nan, np.inf, -np.inf], [-0.0, 1e-45, 3.4e38]], np.float32)
    recorder.restart(values)
    slab = pool.acquire()
    recorder.begin(slab, 0, 0)
    for _ in range(2):
        recorder.step(**{**good(), "observation": values, "reward": np.array([np.nan, np.inf])})
    recorder.finish(0, 0, 0)
    tensors = slab_tensors(slab, [2, 2])
    for key in (("observation",), ("next", "observation")):
        assert tensors[key].numpy().tobytes() == np.stack([values, values], 1).tobytes()
    reward = tensors["next", "reward"]
    assert reward[0].isnan().all()
    assert reward[1].isinf().all()


@pytest.mark.parametrize("compact", [False, True])
def test_root_and_next_entries_may_be_recorded_separately(compact: bool) -> None:
    leaves = BatchLeaves(
        observation=(Leaf(("x",), "float32", (2,)),),
        outputs=(Leaf(("action",), "int64", ()),),
        step_only=(Leaf(("x",), "int8", ()), Leaf(("y",), "float32", ())),
        root_only=frozenset({("x",)}),
        compact=compact,
    )
    pool = SlabPool(Placement(leaves.layout(), 1, 1, 3), 1)
    current = np.zeros(2, np.float32)
    recorder = Recorder(
        leaves.layout(),
        [(("x",), current, True), (("x",), None, False), (("y",), None, False)],
        [("action",)],
        envs=1,
        batched=False,
    )
    given = [(np.full(2, t, np.float32), np.int8(10 + t), np.float32(20 + t)) for t in range(4)]
    recorder.restart(given[0])
    slab = pool.acquire()
    recorder.begin(slab, 0, 0)
    for t in range(1, 4):
        resets = recorder.step(given[t], 0.0, t == 1, False, (t,))
        if resets:
            recorder.reset((np.full(2, 7, np.float32), np.int8(0), np.float32(0)))
    recorder.finish(0, 0, 0)
    batch = slab_tensors(slab, [3])
    assert batch["x",].tolist() == [[0, 0], [7, 7], [2, 2]]
    assert batch["next", "y"].tolist() == [21, 22, 23]
    assert current.tolist() == [3, 3]
    assert ("next", "x") not in batch if compact else batch["next", "x"].tolist() == [11, 12, 13]

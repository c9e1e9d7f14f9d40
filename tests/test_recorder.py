"""The Recorder against a plain numpy model: any leaves, any pattern of ends, any switches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollect._core import Leaf, Placement, Recorder, SlabPool
from pycollect.batch.frame import BatchLeaves
from pycollect.batch.layout import Key
from pycollect.batch.slab_views import slab_tensors

FILL = 0xEE
SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 2), (0,), (17,)]
DTYPES = ["float32", "float64", "uint8", "int64", "bool", "float16"]


@dataclass(frozen=True)
class Case:
    """What one run looks like."""

    envs: int
    batched: bool
    steps: int
    rollouts: int
    leaves: tuple[Leaf, ...]
    max_frames: int
    skips: bool
    set_truncated: bool
    optional: bool
    restarts: bool
    seed: int

    @property
    def rows(self) -> int:
        """Workers of the slab; the recorder writes the last row."""
        return 1 + self.seed % 2

    def batch_leaves(self) -> BatchLeaves:
        return BatchLeaves(
            observation=self.leaves,
            outputs=(Leaf(("action",), "int64", ()), Leaf(("extra", "value"), "float32", (2,))),
            step_count=self.optional or self.max_frames > 0,
            policy_version=self.optional,
            mask=self.skips,
        )


@st.composite
def cases(draw: Any) -> Case:
    batched = draw(st.booleans())
    kinds = draw(
        st.lists(
            st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=3
        )
    )
    leaves = tuple(Leaf(("deep", str(i)), *kind) for i, kind in enumerate(kinds))
    skips = draw(st.booleans())
    return Case(
        envs=draw(st.integers(1, 4)) if batched else 1,
        batched=batched,
        steps=draw(st.integers(1, 6)),
        rollouts=draw(st.integers(1, 3)),
        leaves=leaves,
        max_frames=0 if skips else draw(st.integers(0, 3)),
        skips=skips,
        set_truncated=draw(st.booleans()),
        optional=draw(st.booleans()),
        restarts=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


class Source:
    """Random steps: [P, ...] arrays, and the form in which an env would give them."""

    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, np.random.default_rng(case.seed)

    def arrays(self, leaves: Any) -> list[np.ndarray]:
        result = []
        for leaf in leaves:
            numbers = self.rng.integers(
                0, 2 if leaf.dtype == "bool" else 100, (self.case.envs, *leaf.shape)
            )
            result.append(numbers.astype(leaf.dtype))
        return result

    def flags(self) -> np.ndarray:
        return self.rng.random(self.case.envs) < 0.3

    def given(self, array: np.ndarray, reads: str = "") -> Any:
        """Without P where not batched; strided, of a wider dtype, or a tensor at times."""
        array = array if self.case.batched else array[0, ...]
        way = self.rng.integers(0, 4)
        if way == 0 and array.dtype == np.float32 and not reads:
            return array.astype(np.float64)
        if way == 1 and array.ndim and array.size:
            return np.repeat(array, 2, axis=-1)[..., ::2]
        if way == 2 or reads == "tensor":
            return torch.from_numpy(np.array(array))
        return array


@dataclass
class Model:
    """What a recorder does, in numpy and Python."""

    case: Case
    ids: np.ndarray = field(init=False)
    lengths: np.ndarray = field(init=False)
    returns: np.ndarray = field(init=False)
    dummy: np.ndarray = field(init=False)
    current: list[np.ndarray] = field(init=False)
    episodes: list[tuple[int, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        envs = self.case.envs
        self.ids = np.full(envs, -1)
        self.lengths, self.returns = np.zeros(envs, int), np.zeros(envs)
        self.dummy = np.zeros(envs, bool)

    def start(self, envs: np.ndarray) -> None:
        self.ids[envs] += 1
        self.lengths[envs], self.returns[envs], self.dummy[envs] = 0, 0, False

    def restart(self, observation: list[np.ndarray]) -> None:
        self.current = [array.copy() for array in observation]
        self.start(np.ones(self.case.envs, bool))

    def begin(self) -> None:
        self.frames: list[dict[Key, np.ndarray]] = []

    def step(
        self, observation: Any, reward: Any, terminated: Any, truncated: Any, outs: Any
    ) -> Any:
        case, there = self.case, ~self.dummy
        end = terminated | truncated | (self.lengths + 1 == case.max_frames)
        done = end & there
        frame: dict[Key, np.ndarray] = {}
        for leaf, now, after in zip(case.leaves, self.current, observation, strict=True):
            frame[leaf.key], frame[("next", *leaf.key)] = now, after
        frame["action",], frame["extra", "value"] = outs
        frame["next", "reward"] = reward.astype(np.float32)[:, None]
        frame["next", "terminated"] = terminated[:, None]
        cut = self.lengths + 1 == case.max_frames
        frame["next", "truncated"] = (truncated | cut)[:, None]
        frame["next", "done"] = end[:, None]
        for flag in ("done", "terminated", "truncated"):
            frame[flag,] = np.zeros((case.envs, 1), bool)
        frame["step_count",] = self.lengths[:, None].copy()
        frame["next", "step_count"] = self.lengths[:, None] + 1
        frame["collector", "policy_version"] = np.full(case.envs, 7)
        frame["collector", "mask"] = np.ones(case.envs, bool)
        frame["collector", "traj_ids"] = self.ids.copy()
        frame = {key: array.copy() for key, array in frame.items()}
        for array in frame.values():
            array[~there] = 0
        frame["collector", "traj_ids"][~there] = -1
        self.frames.append(frame)
        self.lengths[there] += 1
        self.returns[there] += reward[there]
        for p in np.flatnonzero(done):
            self.episodes.append((int(p), float(self.returns[p]), int(self.lengths[p])))
        self.current = [array.copy() for array in observation]
        self.start(~there)
        if case.skips:
            self.dummy = done
            return np.zeros(case.envs, bool)
        return done

    def reset(self, done: np.ndarray, observation: list[np.ndarray]) -> None:
        for now, after in zip(self.current, observation, strict=True):
            now[done] = after[done]
        self.start(done)

    def finish(self) -> dict[Key, np.ndarray]:
        """[P, T, ...] by key."""
        rollout = {
            key: np.stack([frame[key] for frame in self.frames], 1) for key in self.frames[0]
        }
        if self.case.set_truncated:
            for p, ids in enumerate(rollout["collector", "traj_ids"]):
                there = np.flatnonzero(ids >= 0)
                for key in (("next", "truncated"), ("next", "done")) if there.size else ():
                    rollout[key][p, there[-1]] = True
        return rollout


def as_argument(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def run(case: Case) -> None:
    source, model, leaves = Source(case), Model(case), case.batch_leaves()
    layout = leaves.layout()
    lead = (case.envs,) if case.batched else ()
    current = {
        leaf.key: torch.zeros((*lead, *leaf.shape), dtype=getattr(torch, leaf.dtype))
        for leaf in case.leaves
    }
    counts = torch.full((*lead, 1), -1)
    recorder = Recorder(
        layout,
        [(key, tensor, True) for key, tensor in current.items()],
        [leaf.key for leaf in leaves.outputs],
        envs=case.envs,
        batched=case.batched,
        max_frames_per_traj=case.max_frames,
        skips_after_done=case.skips,
        set_truncated=case.set_truncated,
        step_count=counts if leaves.step_count else None,
    )
    pool = SlabPool(Placement(layout, case.rows, case.envs, case.steps), 1)

    def restart() -> None:
        observation = source.arrays(case.leaves)
        recorder.restart(as_argument([source.given(array) for array in observation]))
        model.restart(observation)

    restart()
    frames = 0
    for number in range(case.rollouts):
        if number and case.restarts:
            restart()
        slab = pool.acquire()
        slab.array()[:] = FILL
        recorder.begin(slab, case.rows - 1, 7)
        model.begin()
        counted = []
        for _ in range(case.steps):
            counted.append(counts.view(case.envs, 1).numpy().copy())
            check_current(current, model, case)
            one_step(case, source, model, recorder, leaves)
        header = recorder.finish(3, 2, number)
        rollout = model.finish()
        check_rollout(case, slab, rollout)
        is_frame = rollout["collector", "traj_ids"] >= 0
        collected = int(is_frame.sum())
        if leaves.step_count:
            told = np.stack(counted, 1)[is_frame]
            np.testing.assert_array_equal(told, rollout[("step_count",)][is_frame])
        frames += collected
        assert (header.worker, header.incarnation, header.sequence) == (3, 2, number)
        assert (header.frames, header.policy_version) == (collected, 7)
        assert (header.envs, header.steps) == (case.envs, case.steps)
        assert slab.header(case.rows - 1).frames == collected
        assert recorder.frames == frames
        assert recorder.take_episodes() == model.episodes
        assert recorder.take_episodes() == []
        model.episodes.clear()
        del slab


def one_step(case: Case, source: Source, model: Model, recorder: Recorder, leaves: Any) -> None:
    observation, outs = source.arrays(case.leaves), source.arrays(leaves.outputs)
    reward = source.rng.random(case.envs)
    terminated, truncated = source.flags(), source.flags()
    count = recorder.step(
        as_argument([source.given(array) for array in observation]),
        scalar_or_row(case, reward),
        scalar_or_row(case, terminated),
        scalar_or_row(case, truncated),
        tuple(source.given(out, "tensor") for out in outs),
    )
    done = model.step(observation, reward, terminated, truncated, outs)
    assert recorder.done.tolist() == done.tolist()
    assert count == done.sum()
    if count:
        after = source.arrays(case.leaves)
        recorder.reset(as_argument([source.given(array) for array in after]))
        model.reset(done, after)


def scalar_or_row(case: Case, row: np.ndarray) -> Any:
    return row if case.batched else row[0].item()


def check_current(current: dict[Key, torch.Tensor], model: Model, case: Case) -> None:
    for tensor, array in zip(current.values(), model.current, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array if case.batched else array[0])


def check_rollout(case: Case, slab: Any, rollout: dict[Key, np.ndarray]) -> None:
    tensors = slab_tensors(slab, [case.rows, case.envs, case.steps])
    for key, tensor in tensors.items():
        own = tensor[-1].numpy()
        np.testing.assert_array_equal(own, rollout[key].astype(own.dtype), err_msg=str(key))
        if case.rows > 1 and tensor.numel():
            assert (tensor[0].contiguous().view(torch.uint8) == FILL).all(), key


@settings(max_examples=300, deadline=None)
@given(cases())
def test_against_the_model(case: Case) -> None:
    run(case)


# What it refuses


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
        ("observation", np.zeros((2, 4), np.float32), r"observation.*\[2, 3\].*\[2, 4\]"),
        ("observation", np.zeros(3, np.float32), "observation"),
        ("observation", np.zeros((3, 3), np.float32), "observation"),
        ("observation", np.zeros((2, 3), np.complex64), "observation.*complex64"),
        ("observation", (np.zeros((2, 3), np.float32),) * 2, "observation"),
        ("reward", np.zeros(3), "reward"),
        ("terminated", np.zeros((2, 2), bool), "terminated"),
        ("truncated", np.zeros(1, bool), "truncated"),
        ("outputs", (torch.zeros(3, dtype=torch.int64),), "action"),
        ("outputs", (torch.zeros(2),), "action.*float32"),
        ("outputs", (), "outputs"),
    ],
)
def test_a_step_that_does_not_fit(name: str, value: Any, named: str) -> None:
    recorder, pool = simple()
    recorder.restart(np.zeros((2, 3), np.float32))
    recorder.begin(pool.acquire(), 0, 0)
    with pytest.raises((ValueError, TypeError), match=named):
        recorder.step(**{**good(), name: value})
    for _ in range(2):
        recorder.step(**good())
    assert recorder.finish(0, 0, 0).frames == 4


def single(**options: Any) -> tuple[Recorder, Any]:
    """A recorder of one env in a rollout of three steps, and its slab."""
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


def test_what_the_env_is_given_is_its_own() -> None:
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
    """A tensor as older versions of torch have it: a capsule, no table, and a number of its own."""

    def __init__(self, values: Any) -> None:
        self.tensor = torch.as_tensor(values)

    def __dlpack__(self) -> Any:
        return self.tensor.__dlpack__()

    def __index__(self) -> int:
        return self.tensor.__index__()

    def __float__(self) -> float:
        return float(self.tensor)


def test_a_tensor_that_only_makes_capsules_is_no_number() -> None:
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


def test_an_env_may_take_numpy_scalars_and_more_than_is_recorded() -> None:
    recorder, _ = single(given=[0], scalars=True)
    assert type(recorder.take((torch.tensor(3),))) is np.int64
    recorder, _ = single(given=[1, 0])
    beside, action = recorder.take((torch.tensor(3), np.ones(2, np.float16)))
    assert (beside.dtype, beside.tolist(), action) == (np.float16, [1, 1], 3)
    assert single()[0].take((torch.tensor(3),)) == ()


def test_what_an_env_returned_is_converted_where_it_is_not_the_array_expected() -> None:
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


def test_what_an_env_returned_has_its_entries() -> None:
    recorder, _ = single(given=[0], convert=np.asarray)
    recorder.take((torch.tensor(0),))
    with pytest.raises(ValueError, match=r"step: expected 5 values .*info.*, got 4"):
        recorder.record((np.zeros(3, np.float32), 1.0, False, {}))
    recorder, _ = single(given=[0])
    with pytest.raises(RuntimeError, match=r"take\(\)"):
        recorder.record((np.zeros(3, np.float32), 1.0, False, False))
    with pytest.raises(ValueError, match="values: expected at least 1 arrays, got 0"):
        recorder.take(())
    recorder.abandon()


def test_arrays_of_a_changing_form_are_read_as_they_are() -> None:
    """What is remembered of the array before is no more than a short cut."""
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


def test_a_lazy_tensor_is_refused_also_after_one_that_is_not() -> None:
    leaves = BatchLeaves(observation=(), outputs=(Leaf(("value",), "float32", ()),))
    recorder = Recorder(leaves.layout(), [], [("value",)], envs=1, batched=False)
    recorder.restart(())
    recorder.begin(SlabPool(Placement(leaves.layout(), 1, 1, 3), 1).acquire(), 0, 0)
    recorder.step((), 0.0, False, False, (torch.tensor(1.0),))
    lazy = torch.tensor(1 + 2j, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    with pytest.raises(ValueError, match="lazy negation"):
        recorder.step((), 0.0, False, False, (lazy,))


def test_calls_out_of_order() -> None:
    recorder, pool = simple()
    with pytest.raises(RuntimeError, match="restart"):
        recorder.begin(pool.acquire(), 0, 0)
    recorder.restart(np.zeros((2, 3), np.float32))
    with pytest.raises(RuntimeError, match="step"):
        recorder.step(**good())
    recorder.begin(pool.acquire(), 0, 0)
    with pytest.raises(RuntimeError, match="finish"):
        recorder.finish(0, 0, 0)
    for _ in range(2):
        recorder.step(**good())
    with pytest.raises(RuntimeError, match="step"):
        recorder.step(**good())
    recorder.finish(0, 0, 0)
    recorder.abandon()


def test_a_slab_of_another_form() -> None:
    recorder, _ = simple()
    recorder.restart(np.zeros((2, 3), np.float32))
    _, other = simple(envs=3)
    with pytest.raises(ValueError, match="slab"):
        recorder.begin(other.acquire(), 0, 0)
    layout = BatchLeaves(observation=(), outputs=()).layout()
    with pytest.raises(ValueError, match="slab"):
        recorder.begin(SlabPool(Placement(layout, 1, 2, 2), 1).acquire(), 0, 0)
    _, fitting = simple()
    with pytest.raises(IndexError, match="worker: expected 0 to 0, got 1"):
        recorder.begin(fitting.acquire(), 1, 0)


def test_an_abandoned_rollout_gives_its_slab_back() -> None:
    recorder, pool = simple()
    recorder.restart(np.zeros((2, 3), np.float32))
    recorder.begin(pool.acquire(), 0, 0)
    assert pool.stats().lent == 1
    recorder.abandon()
    assert (pool.stats().lent, pool.stats().free) == (0, 1)


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
def test_a_root_and_what_is_under_next_may_be_recorded_for_themselves(compact: bool) -> None:
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


def test_a_version_that_comes_on_the_way_holds_from_the_next_step_on() -> None:
    leaves = BatchLeaves(
        observation=(Leaf(("observation",), "float32", (2,)),),
        outputs=(Leaf(("action",), "int64", ()),),
        policy_version=True,
    )
    placement = Placement(leaves.layout(), 1, 2, 4)
    current, observation = torch.zeros(2, 2), np.zeros((2, 2), np.float32)
    recorder = Recorder(
        placement.layout,
        [(("observation",), current, False)],
        [("action",)],
        envs=2,
        batched=True,
    )
    recorder.restart(observation)
    slab = SlabPool(placement, 1).acquire()
    recorder.begin(slab, 0, 0)
    flags = np.zeros(2, bool)
    for version in (3, None, 5, None):
        if version is not None:
            recorder.set_policy_version(version)
        action = np.zeros(2, np.int64)
        recorder.step(observation, np.zeros(2), flags, flags, action)
    header = recorder.finish(0, 0, 0)
    versions = slab_tensors(slab, [2, 4])["collector", "policy_version"]
    assert versions.tolist() == [[3, 3, 5, 5]] * 2
    assert header.policy_version == 3  # the oldest

"""The Recorder against a plain numpy model, over random leaves, ends and options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollect._core import Leaf, Placement, Recorder, SlabPool
from pycollect.data.frame import BatchLeaves
from pycollect.data.layout import Key
from pycollect.data.slabs import slab_tensors

FILL = 0xEE
SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 2), (0,), (17,)]
DTYPES = ["float32", "float64", "uint8", "int64", "bool", "float16"]


@dataclass(frozen=True)
class Case:
    """Parameters of one run."""

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
        """Number of workers in the slab; the recorder writes the last row."""
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
    """Random steps as [P, ...] arrays, and as an environment would return them."""

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
        """Return the value, without P if not batched; sometimes strided, wider or a tensor."""
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
    """A recorder in numpy and Python."""

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
        """Return [P, T, ...] arrays by key."""
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

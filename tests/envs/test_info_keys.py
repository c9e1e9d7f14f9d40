"""info_keys: entries of Gymnasium's info, recorded under "next"."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from collect_support import ACTORS, IN_PROCESS, MULTI_STACK, STACK, Way, collecting, parity_policy
from echo_envs import LENGTHS
from envs_for_tests import CountingEnv, NestedEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers import vector as vector_wrappers
from raising import refused, warned

from pycollect import RayCollector, SyncDataCollector
from pycollect.envs.make import make_env_batch

KEYS = ["steps", "half", "place", ("deep", "even"), "word"]


class InfoEnv(CountingEnv):
    """An environment with info entries of several kinds; "end" appears only in last steps."""

    def info(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "half": self.steps / 2,
            "place": np.array([self.number, self.steps], np.int16),
            "deep": {"even": self.steps % 2 == 0},
            "word": f"step {self.steps}",
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0], self.info()

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        info = self.info()
        if terminated:
            info["end"] = self.steps
        return observation, reward, terminated, truncated, info


def info_fns(worker: int = 0, count: int = 3) -> list[Callable[[], InfoEnv]]:
    return [partial(InfoEnv, 10 * worker + p, length=LENGTHS) for p in range(count)]


def vector(mode: str, worker: int = 0) -> Any:
    return SyncVectorEnv(info_fns(worker), autoreset_mode=AutoresetMode[mode])


class Wrapped(gymnasium.vector.VectorWrapper):
    """A wrapper that leaves the autoreset mode of the vector environment unchanged."""


ENTRIES: dict[str, Callable[[int], Any]] = {
    "one": lambda w: info_fns(w)[0],
    "list": info_fns,
    **{
        mode: partial(lambda mode, w: lambda: Wrapped(vector(mode, w)), mode)
        for mode in ("NEXT_STEP", "SAME_STEP", "DISABLED")
    },
    **{
        f"{mode} in lists": partial(
            lambda mode, w: lambda: vector_wrappers.DictInfoToList(vector(mode, w)), mode
        )
        for mode in ("NEXT_STEP", "SAME_STEP", "DISABLED")
    },
}


def assert_infos(td: Any) -> None:
    steps = td["next", "observation"][..., 2].long()
    following = td["next"]
    assert torch.equal(following["steps"], steps)
    assert following["steps"].dtype == torch.int64
    assert torch.equal(following["half"], steps / 2)
    assert following["place"].dtype == torch.int16
    assert torch.equal(following["place"][..., 1].long(), steps)
    assert torch.equal(following["deep", "even"], steps % 2 == 0)
    said = np.array(following.get("word").tolist())
    assert (said == np.char.add("step ", steps.numpy().astype(str))).all()
    assert not {"steps", "half", "place", "deep", "word"} & set(td.keys())


@pytest.mark.parametrize("kind", ENTRIES)
def test_in_process(kind: str) -> None:
    with collecting(IN_PROCESS, ENTRIES[kind], frames=30, info_keys=KEYS) as collector:
        for _ in range(2):
            td = collector.next()
            assert td["next", "done"].any()
            assert_infos(td)
        assert collector.stats()["slow_paths"]["extras"] == 1


def test_only_numbers_become_leaves() -> None:
    with collecting(IN_PROCESS, ENTRIES["list"], frames=30, info_keys=KEYS[:4]) as collector:
        td = collector.next()
        assert not any(collector.stats()["slow_paths"].values())
    assert td["next", "deep", "even"].shape == (3, 10)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("kind", ["one", "list"])
def test_on_ray(ray_cluster: Any, kind: str) -> None:
    with collecting(STACK, ENTRIES[kind], frames=30, info_keys=KEYS) as collector:
        td = collector.next()
    assert_infos(td)
    assert td["next", "steps"].shape == td.batch_size


@pytest.mark.slow
@pytest.mark.ray
def test_per_actor(ray_cluster: Any) -> None:
    collector = RayCollector(
        [ENTRIES["one"](w) for w in range(ACTORS)],
        None,
        frames_per_batch=4,
        collector_kwargs=[{"info_keys": ["steps"]}, {"info_keys": ["half"]}],
        remote_configs={"num_cpus": 1, "memory": 1024**3},
    )
    kinds: set[frozenset[str]] = set()
    with collector:
        while len(kinds) < 2:  # the other worker may be slow
            kinds.add(frozenset(collector.next()["next"].keys()) & {"steps", "half"})
    assert kinds == {frozenset({"steps"}), frozenset({"half"})}


def test_entries_of_last_steps_are_objects() -> None:
    with (
        warned("info_keys") as said,
        SyncDataCollector(info_fns(count=2), None, frames_per_batch=16, info_keys=["end"]) as own,
    ):
        td = own.next()
    assert "'end'" in str(said[0].message)
    done = td["next", "done"][..., 0]
    counts = td["next", "observation"][..., 2]
    for p, t in np.ndindex(*td.batch_size):
        said = td.get(("next", "end")).tolist()[p][t]
        assert said == (int(counts[p, t]) if done[p, t] else None)


def test_episode_statistics() -> None:
    def make() -> Any:
        return RecordEpisodeStatistics(InfoEnv(length=3))

    keys = [("episode", "r")]
    with (
        warned("info_keys") as said,
        SyncDataCollector(make, None, frames_per_batch=6, info_keys=keys) as collector,
    ):
        td = collector.next()
    assert td["next", "episode", "r"] == [None, None, 6.0, None, None, 6.0]
    assert "info_keys={('episode', 'r'): torch.float32}" in str(said[0].message)


def test_the_suggestion_in_a_warning_keeps_the_other_entries() -> None:
    def make() -> Any:
        return RecordEpisodeStatistics(InfoEnv(length=3))

    options: dict[str, Any] = {"frames_per_batch": 6}
    keys = ["steps", ("episode", "r")]
    with warned("info_keys") as said:
        SyncDataCollector(make, None, info_keys=keys, **options).shutdown()
    words = "info_keys={'steps': None, ('episode', 'r'): torch.float32}"
    assert words in str(said[0].message)
    written = {"steps": None, ("episode", "r"): torch.float32}
    with SyncDataCollector(make, None, info_keys=written, **options) as collector:
        td = collector.next()
    assert td["next", "episode", "r"].tolist() == [0, 0, 6, 0, 0, 6]
    assert td["next", "steps"].tolist() == [1, 2, 3, 1, 2, 3]


def test_entries_missing_in_some_infos_are_zeros() -> None:
    class Shy(InfoEnv):
        def info(self) -> dict[str, Any]:
            return {"number": self.steps} if self.steps % 2 else {}

    for entry in (Shy, [Shy, Shy], lambda: SyncVectorEnv([Shy, Shy])):
        with SyncDataCollector(entry, None, frames_per_batch=8, info_keys=["number"]) as collector:
            td = collector.next()
        steps = td["next", "observation"][..., 2].long()
        assert torch.equal(td["next", "number"], steps * (steps % 2))


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.filterwarnings("ignore:info_keys. no info had 'fresh'")
def test_an_entry_of_some_resets_is_not_recorded(parity: int) -> None:
    class Fresh(InfoEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            observation, _ = super().reset(seed=seed)
            return observation, {"fresh": 1.0} if self.episode % 2 == parity else {}

    class Vector(SyncVectorEnv):
        """Not a bare SyncVectorEnv, so its mode stays."""

        def step(self, actions: Any) -> Any:
            return super().step(actions)

    def entry() -> Any:
        return Vector([Fresh], autoreset_mode=AutoresetMode.SAME_STEP)

    keys = {"fresh": torch.float32, "steps": None}
    with SyncDataCollector(entry, None, frames_per_batch=80, info_keys=keys) as collector:
        td = collector.next()
    assert td["next", "done"].any()
    assert torch.equal(td["next", "steps"], td["next", "observation"][..., 2].long())
    assert not td["next", "fresh"].any()


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *((IN_PROCESS, kind) for kind in ("single", "list", "SAME_STEP", "NEXT_STEP")),
        (MULTI_STACK, "list"),
    ],
)
def test_an_entry_with_a_dtype_is_a_tensor_even_if_the_first_step_lacks_it(
    way: Way, kind: str, recwarn: pytest.WarningsRecorder
) -> None:
    def entry(worker: int) -> Any:
        if kind in ("SAME_STEP", "NEXT_STEP"):
            return vector(kind, worker)
        fns = info_fns(worker)
        return fns if kind == "list" else fns[0]

    keys = {"end": torch.float64, "steps": None}
    with collecting(way, entry, parity_policy(), frames=60, info_keys=keys) as collector:
        td = collector.next()
    assert not [own for own in recwarn if "info_keys" in str(own.message)]
    ended = td["next", "terminated"].squeeze(-1)
    assert ended.any()
    assert td["next", "end"].dtype == torch.float64
    expected = torch.where(ended, td["next", "observation"][..., 2].double(), 0.0)
    assert torch.equal(td["next", "end"], expected)


def test_an_entry_that_changes_its_form_is_named() -> None:
    class Growing(InfoEnv):
        def info(self) -> dict[str, Any]:
            return {"rows": np.zeros(self.steps)}

    with (
        SyncDataCollector(Growing, None, frames_per_batch=8, info_keys=["rows"]) as collector,
        refused(ValueError, "info_keys") as caught,
    ):
        collector.next()
    assert "'rows'" in str(caught.value)


class Telling(CountingEnv):
    """An environment that returns the same info in each step."""

    def __init__(self, value: Any) -> None:
        super().__init__(length=3)
        self.value = value

    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], {"x": self.value})


def told(value: Any, keys: Any, kind: str = "one") -> torch.Tensor:
    """Return the only value recorded under "x"."""
    make = partial(Telling, value)
    entry = {"one": make, "list": [make, make], "vector": lambda: SyncVectorEnv([make, make])}[kind]
    with SyncDataCollector(entry, None, frames_per_batch=8, info_keys=keys) as collector:
        said = collector.next()["next", "x"].flatten()
    assert torch.equal(said, said[:1].expand(8))
    return said[0]


@pytest.mark.parametrize("kind", ["one", "list", "vector"])
@pytest.mark.parametrize(
    ("value", "asked", "dtype"),
    [
        (127, torch.int8, torch.int8),
        (1, torch.uint8, torch.uint8),
        (1, torch.bool, torch.bool),
        (0.1, torch.float64, torch.float64),
        (np.float64(0.5), torch.float32, torch.float32),
        (np.complex64(1 + 2j), None, torch.complex64),
        (np.complex64(1 + 2j), torch.complex128, torch.complex128),
        (1 + 2j, torch.complex64, torch.complex64),
        (np.uint64(2**63 + 1), None, torch.uint64),
    ],
)
def test_values_are_kept(kind: str, value: Any, asked: Any, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = told(value, {"x": asked}, kind)
    assert (said.dtype, said.item()) == (dtype, value)


def test_arrays_with_an_entry_of_each_row_are_not_read_row_by_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop over 64 rows took as long as the steps of a fast vector environment."""
    monkeypatch.setattr("pycollect.envs.info._conform", None)
    for mode in ("NEXT_STEP", "DISABLED"):
        with collecting(IN_PROCESS, ENTRIES[mode], frames=30, info_keys=KEYS) as collector:
            assert_infos(collector.next())


@pytest.mark.parametrize(
    ("value", "dtype"), [(0.5, torch.float32), (1 + 2j, torch.complex64), (2, torch.int64)]
)
def test_numbers_of_python_have_the_dtype_of_torch(value: Any, dtype: torch.dtype) -> None:
    said = told(value, ["x"])
    assert (said.dtype, said.item()) == (dtype, value)


@pytest.mark.parametrize(
    ("value", "dtype", "given", "remedy"),
    [
        (300, "int8", "300", "info_keys={'x': torch.int64}"),
        (2**31 + 5, "int32", "2147483653", "torch.int64"),
        (-1, "uint8", "-1", "torch.int64"),
        (2**64 - 1, "int64", "18446744073709551615", "info_keys={'x': torch.uint64}"),
        (np.array([1, 2**40]), "int32", "1099511627776", "torch.int64"),
        (1.5, "int32", "float64", "torch.float64"),
        (1 + 2j, "float32", "complex128", "torch.complex128"),
        (torch.tensor(3.0), "float32", "tensor(3.)", ""),
        ([1, 2], "float32", "[1, 2]", ""),
        (None, "float32", "None", ""),
        (2**70, "int64", str(2**70), ""),
    ],
)
def test_a_value_that_does_not_fit_is_named(
    value: Any, dtype: str, given: str, remedy: str
) -> None:
    with refused(ValueError, "info_keys") as caught:
        told(value, {"x": getattr(torch, dtype)})
    for word in ("'x'", dtype, given, remedy):
        assert word in str(caught.value)


@pytest.mark.parametrize("kind", ["one", "list", "SAME_STEP", "NEXT_STEP"])
def test_an_entry_in_no_info_is_named_at_the_end_of_an_episode(kind: str) -> None:
    keys = {"episode.r": torch.float32, "end": torch.float32}
    with (
        SyncDataCollector(
            ENTRIES[kind](0), parity_policy(), frames_per_batch=3, info_keys=keys
        ) as collector,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        ended = False
        for _ in range(30):
            batch = collector.next()
            ended |= bool(batch["next", "done"].any())
            assert len(said) == ended
    assert ended
    assert said[0].filename == __file__
    words = str(said[0].message)
    assert "'episode.r'" in words
    assert "('episode', 'r')" in words


@pytest.mark.parametrize(
    ("keys", "error", "word"),
    [
        ("steps", TypeError, "list"),
        ([3], TypeError, "3"),
        (["reward"], ValueError, "'reward'"),
        (["terminated"], ValueError, "'terminated'"),
        (["a", "a"], ValueError, "'a'"),
        ({"a": "word"}, TypeError, "'word'"),
        ({"a": torch.bfloat16}, TypeError, "torch.bfloat16"),
        ({"reward": torch.float32}, ValueError, "'reward'"),
        (["observation"], ValueError, "'observation'"),
    ],
)
def test_refused(keys: Any, error: type[Exception], word: str) -> None:
    with refused(error, "info_keys") as caught:
        SyncDataCollector(InfoEnv, None, frames_per_batch=4, info_keys=keys)
    assert word in str(caught.value)


def test_envs_are_closed_if_info_keys_are_refused() -> None:
    env = NestedEnv()
    with refused(ValueError, "info_keys") as caught:
        make_env_batch(lambda: env, info_keys={("deep",): None})
    assert "'deep'" in str(caught.value)
    assert env.closed == 1


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("in_lists", [False, True])
def test_statistics_of_a_vector_wrapper(kind: Any, mode: AutoresetMode, in_lists: bool) -> None:
    def env() -> Any:
        rows = [partial(CountingEnv, number, length=LENGTHS) for number in range(3)]
        counted = vector_wrappers.RecordEpisodeStatistics(kind(rows, autoreset_mode=mode))
        return vector_wrappers.DictInfoToList(counted) if in_lists else counted

    with SyncDataCollector(
        env,
        parity_policy(),
        frames_per_batch=90,
        info_keys={("episode", "r"): torch.float64, ("episode", "l"): torch.int64},
    ) as collector:
        batch = collector.next()
    told, ends = batch["next", "episode"], batch["next", "done"][..., 0]
    assert "mask" not in set(batch["collector"].keys())
    for row in range(3):
        start = 0
        for end in ends[row].nonzero()[:, 0].tolist():
            rewards = batch["next", "reward"][row, start : end + 1]
            assert told["r"][row, end] == rewards.sum()
            assert told["l"][row, end] == len(rewards)
            start = end + 1
        assert start > 0
    assert not told["l"][~ends].any()


@pytest.mark.parametrize("name", ["final_obs", "terminal_observation"])
def test_terminal_observations_in_a_list_of_infos(name: str) -> None:
    """SuperSuit returns such lists: without final_info, and another key for the observation."""

    class Listed(vector_wrappers.DictInfoToList):
        def step(self, actions: Any) -> Any:
            *rest, infos = super().step(actions)
            own = [info.get("final_info", info) for info in infos]
            last = [{name: info["final_obs"]} if "final_obs" in info else {} for info in infos]
            return *rest, [{**mine, **final} for mine, final in zip(own, last, strict=True)]

    with SyncDataCollector(
        lambda: Listed(vector("SAME_STEP")),
        parity_policy(),
        frames_per_batch=90,
        info_keys=["steps"],
    ) as collector:
        td = collector.next()
    steps, following = td["observation"][..., 2], td["next", "observation"][..., 2]
    assert td["next", "done"].any()
    assert torch.equal(following, steps + 1)
    assert torch.equal(td["next", "steps"], following.long())


def test_a_list_that_lacks_infos_is_refused() -> None:
    class Short(vector_wrappers.DictInfoToList):
        def step(self, actions: Any) -> Any:
            *rest, infos = super().step(actions)
            return *rest, infos[:-1]

    with refused(ValueError, "info"):
        SyncDataCollector(
            lambda: Short(vector("NEXT_STEP")), None, frames_per_batch=9, info_keys=["steps"]
        )

"""Extras: text, ragged and other leaves without a fixed shape, from environment to batch."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import tensordict
import torch
from collect_support import (
    ASYNC,
    CAT_0,
    CAT_TIME,
    CENTRAL,
    CENTRAL_ASYNC,
    GROUPS,
    IN_PROCESS,
    MULTI_0,
    MULTI_ASYNC,
    MULTI_STACK,
    MULTI_TIME,
    STACK,
    Way,
    collected_frames,
    collecting,
    marked,
    marks_of,
)
from echo_envs import LENGTHS
from envs_for_tests import TextEnv
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FilterObservation
from raising import refused
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)
from tensordict.nn import TensorDictModule, TensorDictModuleBase

from pycollect import SyncDataCollector, split_trajectories
from pycollect.data.objects import object_stack

ACTORS = marked(STACK, CAT_0, CAT_TIME, ASYNC[2], central=False)
PROCESSES = marked(MULTI_STACK, MULTI_0, MULTI_TIME, MULTI_ASYNC[2], central=False)


def text_fns(worker: int, count: int = 3) -> list[Callable[[], TextEnv]]:
    return [partial(TextEnv, 10 * worker + p, length=LENGTHS) for p in range(count)]


def text_vector(worker: int, kind: Any, mode: str, **kwargs: Any) -> Any:
    return kind(text_fns(worker), autoreset_mode=AutoresetMode[mode], **kwargs)


class Compact(SyncVectorEnv):
    """A masked reset returns only the rows of the mask, in another order, as EnvPool's can."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask")
        observation, info = super().reset(seed=seed, options=options)
        if mask is None:
            return observation, info
        rows = np.flatnonzero(mask)[::-1]
        some = {
            "hint": tuple(observation["hint"][row] for row in rows),
            "count": observation["count"][rows],
            "deep": {"rows": tuple(observation["deep"]["rows"][row] for row in rows)},
        }
        return some, {"env_id": rows}


ENTRIES: dict[str, Callable[[int], Any]] = {
    "one": lambda w: text_fns(w)[0],
    "list": text_fns,
    "list of one": lambda w: text_fns(w, 1),
    **{
        f"SyncVectorEnv {mode}": partial(
            lambda mode, w: partial(text_vector, w, SyncVectorEnv, mode), mode
        )
        for mode in ("NEXT_STEP", "SAME_STEP", "DISABLED")
    },
    "compact resets": lambda w: partial(text_vector, w, Compact, "DISABLED"),
    "uncollected cells": lambda w: partial(
        text_vector, w, AsyncVectorEnv, "NEXT_STEP", shared_memory=False
    ),
}


def echo(td: TensorDictBase) -> TensorDictBase:
    """Choose the action by the length of the text, and repeat the text as an output."""
    batch = td.batch_size
    texts = td.get("hint").tolist() if batch else [td["hint"]]
    action = torch.tensor([len(text) % 2 for text in texts])
    td.set("action", action if batch else action[0])
    said = [f"you said {text}" for text in texts]
    return td.set("said", NonTensorStack(*map(NonTensorData, said)) if batch else said[0])


def cells(td: TensorDictBase) -> list[Any]:
    """Return the frames of a batch as a list."""
    return [td[place] for place in np.ndindex(*td.batch_size)]


def assert_true(frame: Any, acts: bool = True) -> None:
    """Assert that the text and shape of a frame match its counter."""
    if frame["collector", "traj_ids"] < 0:
        assert frame["hint"] is frame["next", "hint"] is None
        assert frame["deep", "rows"].shape == frame["next", "deep", "rows"].shape == (0, 2)
        return
    for state in (frame, frame["next"]):
        numbers = [int(n) for n in state["count"]]
        assert state["hint"] == "{} {} {}".format(*numbers)
        assert torch.equal(state["deep", "rows"], torch.full((numbers[2] + 1, 2), numbers[2]))
    if acts:
        assert frame["said"] == f"you said {frame['hint']}"
        assert frame["action"] == len(frame["hint"]) % 2


def hint_alone(worker: int) -> Callable[[], Any]:
    """Return a callable for an environment that observes only a text."""
    return lambda: FilterObservation(text_fns(worker)[0](), ["hint"])


@pytest.mark.parametrize(
    "entry",
    [*map(ENTRIES.get, ("one", "list", "SyncVectorEnv SAME_STEP")), hint_alone],
    ids=["one", "list", "vector", "text alone"],
)
def test_compact_batches_leave_out_the_next_text(entry: Any) -> None:
    batches = []
    for compact in (True, False):
        with collecting(IN_PROCESS, entry, frames=9, compact_obs=compact) as collector:
            collector.set_seed(3)
            batches.append([collector.next() for _ in range(2)])
    for compact_td, td in zip(*batches, strict=True):
        assert set(compact_td["next"].keys()) == {"reward", "done", "terminated", "truncated"}
        assert "hint" in td["next"]
        assert compact_td["hint"] == td["hint"]


@pytest.mark.parametrize("arguments", [{}, {"max_frames_per_traj": 2}, {"reset_at_each_iter": 1}])
@pytest.mark.parametrize("kind", ENTRIES)
def test_in_process(kind: str, arguments: dict[str, Any]) -> None:
    if kind == "uncollected cells" and "max_frames_per_traj" in arguments:
        pytest.skip("refused")
    frames = 9 if kind in ("one", "list of one") else 27
    with collecting(IN_PROCESS, ENTRIES[kind], echo, frames=frames, **arguments) as collector:
        for _ in range(3):
            td = collector.next()
            assert isinstance(td["deep"], LazyStackedTensorDict)
            assert td["deep"].stack_dim == td.ndim - 1
            assert td["deep"].names == td.names
            for frame in cells(td):
                assert_true(frame)
        assert collector.stats()["slow_paths"]["extras"] == 1
    dummies = td.numel() - collected_frames(td)
    assert bool(dummies) == (kind == "uncollected cells")


def test_lost_texts_of_a_trajectory() -> None:
    """An episode ends with its true successor, and the next root has the text of the reset."""
    with collecting(IN_PROCESS, ENTRIES["one"], echo, frames=6) as collector:
        td = collector.next()
    assert td["hint"] == ["0 0 0", "0 0 1", "0 0 2", "0 1 0", "0 2 0", "0 2 1"]
    assert td["next", "hint"] == ["0 0 1", "0 0 2", "0 0 3", "0 1 1", "0 2 1", "0 2 2"]
    assert td["said"][0] == "you said 0 0 0"


def test_policies_that_do_not_read_them_stay_fast() -> None:
    def act(count: torch.Tensor) -> torch.Tensor:
        return (count[..., 2] % 2).long()

    with refused(ValueError, "policy"):
        SyncDataCollector(TextEnv, lambda other, one: other, frames_per_batch=2)
    with collecting(IN_PROCESS, ENTRIES["list"], act, frames=9) as collector:
        for frame in cells(collector.next()):
            assert_true(frame, acts=False)
        assert collector.stats()["slow_paths"]["policy_tensordict"] == 0


def test_random_actions() -> None:
    with collecting(IN_PROCESS, ENTRIES["list"], echo, frames=9, init_random_frames=9) as collector:
        first, second = collector.next(), collector.next()
    for frame in cells(first):
        assert_true(frame, acts=False)
    assert {text for row in first.get("said").tolist() for text in row} == {None}
    for frame in cells(second):
        assert_true(frame)


@pytest.mark.parametrize("way", [*ACTORS, *PROCESSES])
@pytest.mark.parametrize("kind", ["one", "list", "uncollected cells"])
def test_from_workers(way: Way, kind: str) -> None:
    frames = 9 if kind == "one" else 27
    with collecting(way, ENTRIES[kind], echo, frames=frames) as collector:
        for _ in range(2):
            td = collector.next()
            assert td.batch_size == way.shape(1 if kind == "one" else 3, kind != "one", 9)
            for frame in cells(td):
                assert_true(frame)
        stats = collector.stats()
        served = [own for own in stats["workers"].values() if own["frames"]]
        assert stats["slow_paths"]["extras"] == len(served) >= (2 if way.sync else 1)


def count_parity(count: torch.Tensor) -> torch.Tensor:
    return (count[..., 2] % 2).long()


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=way.name, marks=marks_of(way))
        for way in (CENTRAL, GROUPS, CENTRAL_ASYNC)
    ],
)
@pytest.mark.parametrize("kind", ["one", "list", "uncollected cells"])
def test_texts_stay_in_the_worker_with_central_inference(way: Way, kind: str) -> None:
    policy = TensorDictModule(count_parity, ["count"], ["action"])
    frames = 24 if kind == "uncollected cells" else 12
    with collecting(way, ENTRIES[kind], policy, frames=frames) as collector:
        for _ in range(3):
            for frame in cells(collector.next()):
                assert_true(frame, acts=False)


@pytest.mark.processes
def test_a_policy_that_reads_text_with_central_inference() -> None:
    with (
        refused(ValueError, "policy"),
        collecting(CENTRAL, ENTRIES["one"], lambda td: td["hint"], frames=4),
    ):
        pass


@pytest.mark.parametrize("kind", ["one", "list", "SyncVectorEnv SAME_STEP", "uncollected cells"])
def test_split(kind: str) -> None:
    with collecting(IN_PROCESS, ENTRIES[kind], echo, frames=27) as collector:
        td = collector.next()
    rows = split_trajectories(td)
    assert rows.batch_size[0] == (td["collector", "traj_ids"].unique() >= 0).sum()
    mask = rows["collector", "mask"]
    assert int(mask.sum()) == collected_frames(td)
    for place in np.ndindex(*rows.batch_size):
        assert_true(rows[place])
    for row in rows:
        texts = [text for text in row.get("hint").tolist() if text is not None]
        assert [int(text.split()[2]) for text in texts] == list(range(len(texts))) or kind != "one"
    flat = split_trajectories(td, format="cat")
    for frame in cells(flat.td):
        assert_true(frame)


def test_split_trajs_and_postproc() -> None:
    def shout(td: TensorDictBase) -> TensorDictBase:
        return td.set("loud", td["count"].sum(-1))

    arguments = {"split_trajs": True, "postproc": shout}
    with collecting(IN_PROCESS, ENTRIES["list"], echo, frames=27, **arguments) as collector:
        td = collector.next()
    assert td.batch_size == (12, 4)
    for frame in cells(td):
        assert_true(frame)
    assert torch.equal(td["loud"], td["count"].sum(-1))


class Varying(gymnasium.Env[Any, Any]):
    """Observation n has the number n in each entry, in a form that changes with n."""

    observation_space = spaces.Dict(
        image=spaces.Box(-99, 99, (2,), np.float32), n=spaces.Discrete(99), text=spaces.Text(9)
    )
    action_space = spaces.Discrete(2)

    def __init__(self, lacks: str = "") -> None:
        self.lacks = lacks

    def shown(self) -> Any:
        n = self.steps
        image: Any = np.full(2, n, np.float32)
        forms = [image, [n, n], image.astype(np.float64), np.repeat(image, 2)[::2], image.tolist()]
        entries = {"image": forms[n % 5], "n": np.int64(n) if n % 3 else n, "text": str(n)}
        if n == 7:
            entries.pop(self.lacks, None)
        return dict(reversed(entries.items()))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self.shown(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.shown(), 1.0, False, self.steps == 23, {}


def test_entries_may_change_their_form() -> None:
    with SyncDataCollector(Varying, None, frames_per_batch=60) as collector:
        batch = collector.next()
    assert batch is not None
    steps = torch.arange(60) % 23
    for entries, expected in ((batch, steps), (batch["next"], steps + 1)):
        assert (entries["image"] == expected.unsqueeze(1)).all()
        assert entries["n"].tolist() == expected.tolist()
        assert entries["text"] == [str(n) for n in expected.tolist()]


class Steady(Varying):
    """Entries keep their form."""

    def shown(self) -> Any:
        return {
            "image": np.full(2, self.steps, np.float32),
            "n": self.steps,
            "text": f"{self.steps}",
        }


class Ragged(Steady):
    """Also has an entry that is no text, so that not all extras are objects."""

    observation_space = spaces.Dict(
        **Varying.observation_space.spaces, ragged=spaces.Sequence(spaces.Box(-99, 99, (1,)))
    )

    def shown(self) -> Any:
        return super().shown() | {"ragged": [np.full(1, self.steps, np.float32)] * 2}


def test_entries_of_every_kind_belong_to_their_step() -> None:
    with SyncDataCollector(Ragged, None, frames_per_batch=10) as collector:
        batch = collector.next()
    assert batch is not None
    for entries, first in ((batch, 0), (batch["next"], 1)):
        assert entries["n"].tolist() == list(range(first, first + 10))
        assert entries["text"] == [str(n) for n in range(first, first + 10)]
        for n in range(10):
            assert (torch.as_tensor(np.asarray(entries[n]["ragged"])) == first + n).all()


class Answers(TensorDictModuleBase):
    """A policy that returns a text, which is made of the observation's text."""

    in_keys = ("text",)
    out_keys = ("action", "answer")

    def forward(self, td: Any) -> Any:
        td["action"] = torch.zeros((), dtype=torch.int64)
        td["answer"] = NonTensorData(f"re: {td['text']}")
        return td


def test_a_policy_with_texts_reads_the_text_of_its_step() -> None:
    with SyncDataCollector(Steady, Answers(), frames_per_batch=10) as collector:
        batch = collector.next()
    assert batch is not None
    assert batch["text"] == [str(n) for n in range(10)]
    assert [batch[n]["answer"] for n in range(10)] == [f"re: {n}" for n in range(10)]


@pytest.mark.parametrize("name", ["image", "n", "text"])
def test_a_missing_entry_is_refused(name: str) -> None:
    with (
        SyncDataCollector(partial(Varying, name), None, frames_per_batch=20) as collector,
        refused(ValueError, "observation"),
    ):
        collector.next()


class NotesEnv(TextEnv):
    """An environment that returns the same list each time, one item longer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_space = spaces.Dict(
            notes=spaces.Sequence(spaces.Text(5)), graph=spaces.Graph(spaces.Box(0, 1, (2,)), None)
        )
        self.notes: list[str] = []

    def observe(self) -> Any:
        self.notes.append(str(self.steps))
        nodes = np.full((self.steps, 2), 1, np.float32)
        return {"notes": self.notes, "graph": spaces.GraphInstance(nodes, None, None)}


def test_objects_are_not_changed() -> None:
    with SyncDataCollector(NotesEnv, None, frames_per_batch=3) as collector:
        collector.next()
        td = collector.next()
    assert [len(notes) for notes in td.get("notes").tolist()] == [4, 5, 7]
    assert td["graph"][2].nodes.shape == (0, 2)
    assert set(td.keys()) >= {"action", "notes", "graph"}


def made() -> int:
    return sum(type(thing) is NonTensorData for thing in gc.get_objects())


def texts(batched: bool) -> TensorDictBase:
    """Return a batch of texts that nothing has read, [3, 4] or [12]."""
    entries = ENTRIES["list" if batched else "one"]
    with collecting(IN_PROCESS, entries, None, frames=12) as collector:
        td = collector.next()
    return td.select("hint", ("next", "hint"), "count")


@pytest.mark.parametrize("batched", [False, True])
def test_reading_a_list_of_texts_makes_no_objects(batched: bool) -> None:
    gc.collect()
    before = made()
    td = texts(batched)
    read = td["hint"]
    assert made() == before
    assert td.get("hint").tolist() == read
    frames = cells(td)
    assert (
        [read[p][t] for p in range(3) for t in range(4)]
        if batched
        else read == [frame["hint"] for frame in frames]
    )
    assert made() > before


def test_a_part_does_not_keep_the_batch_alive() -> None:
    """The cells of a batch are freed with it, although one step of it is kept."""
    values = np.array([[f"{p}, {t}" * 100 for t in range(50)] for p in range(3)], np.object_)
    cells = weakref.ref(values)
    kept = object_stack(values).unbind(1)[7]
    del values
    gc.collect()
    assert cells() is None
    assert kept.tolist() == [f"{p}, 7" * 100 for p in range(3)]


def pickled(td: TensorDictBase) -> TensorDictBase:
    data = pickle.dumps(td)
    assert b"pycollect" not in data  # it is a plain NonTensorStack
    return pickle.loads(data)


USES: dict[str, Callable[[TensorDictBase], TensorDictBase]] = {
    "pickle": pickled,
    "deepcopy": copy.deepcopy,
    "clone": lambda td: td.clone(),
    "shallow clone": lambda td: td.clone(recurse=False),
    "to": lambda td: td.to(torch.float64),
    "lock": lambda td: td.lock_(),
    "stack": lambda td: torch.stack([td, td])[1],
    "cat": lambda td: torch.cat([td, td])[: len(td)],
    "reshape": lambda td: td.reshape(-1).reshape(td.shape),
    "index": lambda td: td[torch.arange(len(td))],
    "unbind": lambda td: torch.stack(td.unbind(td.ndim - 1), td.ndim - 1),
    "apply": lambda td: td.apply(lambda tensor: tensor + 0),
    "str": lambda td: (str(td), td)[1],
    "update": lambda td: td.clone().update(td),
    "set": lambda td: td.clone(recurse=False).set("other", td.get("hint")),
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("use", USES)
def test_texts_that_were_not_read(use: str, batched: bool) -> None:
    td = texts(batched)
    expected = {key: td.get(key).tolist() for key in ("hint", ("next", "hint"))}
    result = USES[use](td)
    for key, values in expected.items():
        assert result.get(key).tolist() == result[key] == values
        assert isinstance(result.get(key), NonTensorStack)
    if use == "set":
        assert result["other"] == expected["hint"]


def test_a_changed_list_of_texts_changes_the_batch() -> None:
    if not hasattr(tensordict.utils, "LinkedList"):
        pytest.skip("this version of tensordict returns a plain list")
    td = texts(False)
    read = td["hint"]
    read[1] = "other"
    assert td["hint"][1] == td[1]["hint"] == read[1] == "other"
    assert td["hint"][0] == "0 0 0"


def test_text_has_the_device_of_its_batch() -> None:
    with SyncDataCollector(TextEnv, None, frames_per_batch=3, device="cpu") as collector:
        td = collector.next()
    assert td.device == td.get("hint").device == td.get("hint")[0].device == torch.device("cpu")


def test_text_does_not_share_the_state_of_other_text() -> None:
    with SyncDataCollector(TextEnv, None, frames_per_batch=3) as collector:
        locked = collector.next().lock_()
        assert locked.get("hint").is_locked
        td = collector.next()
    hint = td.get("hint")
    assert not hint.is_locked
    hint.tensordicts[0].batch_size = [1]
    assert hint.tensordicts[1].batch_size == ()


def test_text_outputs_that_a_later_call_omits() -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", torch.tensor(0)).set("extra", "a text")

    def silent(td: TensorDictBase) -> TensorDictBase:
        said = td.set("action", torch.tensor(0))
        return said.set("extra", f"{td['count'][2]}") if td["count"][2] < 2 else said

    def forgetful(td: TensorDictBase) -> TensorDictBase:
        said = TensorDict({"action": torch.tensor(0)})
        return said.set("extra", "a text") if td["count"][2] < 2 else said

    with SyncDataCollector(TextEnv, act, frames_per_batch=3) as collector:
        assert collector.next()["extra"] == ["a text"] * 3
    with SyncDataCollector(TextEnv, silent, frames_per_batch=3) as collector:
        said = collector.next()["extra"]
        assert said[1] == said[2] != said[0]  # keeps the last value
    with (
        SyncDataCollector(TextEnv, forgetful, frames_per_batch=3) as collector,
        refused(ValueError, "policy") as caught,
    ):
        collector.next()
    assert "'extra'" in str(caught.value)

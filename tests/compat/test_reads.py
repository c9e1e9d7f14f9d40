"""What users read of a collector, set on it and ask of it, beside TorchRL's on the spot."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

pytest.importorskip("torchrl.collectors")

import torchrl.collectors
from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType

import pycollect

pytestmark = pytest.mark.filterwarnings("ignore")

BOTH = (torchrl.collectors, pycollect)


def pendulum(**kwargs: Any) -> Any:
    return GymEnv("Pendulum-v1", **kwargs)


def three() -> Any:
    return SerialEnv(3, pendulum)


def linear() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


@contextmanager
def made(home: Any, name: str, env: Any = pendulum, **kwargs: Any) -> Iterator[Any]:
    given: dict[str, Any] = {"policy": linear(), "frames_per_batch": 12, "total_frames": 24}
    collector = getattr(home, name)(env, **{**given, **kwargs})
    try:
        yield collector
    finally:
        collector.shutdown()


def plain(value: Any) -> Any:
    """A value of either side in a form that can be compared."""
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, torch.device):
        return str(value)
    return value if isinstance(value, (int, float, str, bool, dict, type(None))) else type(value)


READ = [
    "closed",
    "compact_obs",
    "compiled_policy",
    "compiled_policy_kwargs",
    "cudagraphed_policy",
    "device",
    "cudagraphed_policy_kwargs",
    "env_device",
    "exploration_type",
    "extend_buffer",
    "init_random_frames",
    "max_frames_per_traj",
    "n_env",
    "policy_device",
    "post_collect_hook",
    "postproc",
    "pre_collect_hook",
    "replay_buffer",
    "requested_frames_per_batch",
    "reset_at_each_iter",
    "set_truncated",
    "split_trajs",
    "storing_device",
    "total_frames",
    "track_traj_ids",
    "traj_format",
    "trajs_per_batch",
    "worker_idx",
]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a batch": {"create_env_fn": three},
    "rounded": {"create_env_fn": three, "frames_per_batch": 10},
    "no end": {"total_frames": -1},
    "limits": {"max_frames_per_traj": 5, "init_random_frames": 7},
    "flags": {"reset_at_each_iter": True, "set_truncated": True, "compact_obs": True},
    "split": {"split_trajs": True},
    "ids": {"track_traj_ids": False},
    "trajectories": {"trajs_per_batch": 2, "traj_format": "cat", "max_frames_per_traj": 5},
    "hooks": {"pre_collect_hook": print, "post_collect_hook": id, "postproc": len},
    "exploration": {"exploration_type": ExplorationType.DETERMINISTIC},
    "index": {"worker_idx": 3},
    "buffer": {"replay_buffer": [], "extend_buffer": True},
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_what_is_read_of_a_collector_is_theirs(case: str) -> None:
    seen = []
    for home in BOTH:
        arguments = {"env": pendulum, **ARGUMENTS[case]}
        env = arguments.pop("create_env_fn", arguments.pop("env"))
        arguments.pop("env", None)
        with made(home, "Collector", env, **arguments) as collector:
            seen.append({name: plain(getattr(collector, name)) for name in READ})
    assert seen[0] == seen[1]


NAMES = ("device", "env_device", "policy_device", "storing_device")
DEVICES = [{}, *(dict.fromkeys(c, "cpu") for k in (1, 2, 3, 4) for c in combinations(NAMES, k))]
POLICIES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "module": linear,
    "no parameters": lambda: TensorDictModule(lambda o: o[..., :1], ["observation"], ["action"]),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("env_device", [None, "cpu"])
def test_devices_are_theirs(env_device: str | None, policy: str) -> None:
    """The properties, and what `td.device` says."""
    for given in DEVICES:
        seen = []
        for home in BOTH:
            env = partial(pendulum, device=env_device)
            kwargs = {"policy": POLICIES[policy](), "frames_per_batch": 2, "total_frames": 2}
            with made(home, "Collector", env, **kwargs, **given) as collector:
                td = next(iter(collector))
                own = [td.device, *(getattr(collector, name) for name in NAMES)]
            seen.append([None if device is None else str(device) for device in own])
        assert seen[0] == seen[1], given


def noting(seen: list[str]) -> Callable[[Any], Any]:
    def act(td: Any) -> Any:
        seen.append(str(td.device))
        return td.set("action", torch.zeros(1))

    return act


@pytest.mark.parametrize("env_device", [None, "cpu"])
def test_a_policy_is_told_its_device_as_there(env_device: str | None) -> None:
    """What `td.device` says to a policy that takes a TensorDict."""
    for given in DEVICES:
        seen: list[str] = []
        act = noting(seen)
        last = []
        for home in BOTH:
            env = partial(pendulum, device=env_device)
            kwargs = {"policy": act, "frames_per_batch": 2, "total_frames": 2}
            with made(home, "Collector", env, **kwargs, **given) as collector:
                next(iter(collector))
            last.append(seen[-1])
        assert last[0] == last[1], given


def test_the_environment_is_the_callers() -> None:
    env = TransformedEnv(pendulum(), StepCounter())
    with made(pycollect, "Collector", env) as collector:
        assert collector.env is env
        collector.next()
        assert collector.getattr_env("transform") is env.transform
        assert collector.get_distant_attr("env.transform.parent.batch_size") == torch.Size([])


def test_questions_are_answered_as_theirs() -> None:
    asked: list[Callable[[Any], Any]] = [
        lambda c: c.getattr_env("action_spec").shape,
        lambda c: c.getattr_env("full_action_spec_unbatched").shape,
        lambda c: c.getattr_policy("out_keys"),
        lambda c: c.get_distant_attr("frames_per_batch"),
        lambda c: c.get_distant_attr("policy.module.out_features"),
        lambda c: c.get_distant_attr("policy.in_keys[0]"),
        lambda c: c.map_fn("get_distant_attr", [("env.batch_size",), ("total_frames",)]),
        lambda c: c.map_fn("getattr_env", list_of_kwargs=[{"attr": "batch_size"}]),
        lambda c: c.cascade_execute("env.action_spec.zero"),
        lambda c: c.cascade_execute("total_frames"),
        lambda c: c.get_model("policy") is c.policy,
    ]
    refused: list[tuple[Callable[[Any], Any], type[Exception]]] = [
        (lambda c: c.getattr_env("nothing_of_this_name"), AttributeError),
        (lambda c: c.getattr_policy("nothing"), AttributeError),
        (lambda c: c.get_distant_attr("env.nothing"), AttributeError),
        (lambda c: c.map_fn("total_frames"), AttributeError),
        (lambda c: c.map_fn("getattr_env", [("a",)], [{}, {}]), ValueError),
        (lambda c: c.cascade_execute("total_frames", 1), ValueError),
    ]
    answers = []
    for home in BOTH:
        with made(home, "Collector") as collector:
            answers.append([plain_tensor(ask(collector)) for ask in asked])
            for ask, error in refused:
                with pytest.raises(error):
                    ask(collector)
    assert answers[0] == answers[1]


def plain_tensor(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def form(td: Any) -> Any:
    keys = sorted(td.keys(True, True), key=str)
    return td.shape, [(key, td[key].shape, td[key].dtype) for key in keys], td.names


@pytest.mark.parametrize(
    "case", ["nothing", "a batch", "flags", "ids", "split", "limits"], ids=lambda case: case
)
def test_a_blank_batch_is_as_theirs(case: str) -> None:
    blanks = []
    for home in BOTH:
        arguments = {**ARGUMENTS[case]}
        env = arguments.pop("create_env_fn", pendulum)
        with made(home, "Collector", env, **arguments) as collector:
            blank = collector.fake_tensordict()
            assert blank["observation"].count_nonzero() == 0
            blanks.append(blank)
            if home is pycollect:
                assert collector.stats()["frames"] == 0
                assert case == "split" or form(blank) == form(collector.next())
    assert form(blanks[0]) == form(blanks[1])
    flags = [blank["next", "truncated"].sum() for blank in blanks]
    assert flags[0] == flags[1] == (1 if case == "flags" else 0)


def test_a_rollout_is_a_raw_batch_that_counts() -> None:
    def refuse(td: TensorDict) -> TensorDict:
        raise LookupError("it is not processed")

    called: list[str] = []
    for home in BOTH:
        arguments = {"postproc": refuse, "pre_collect_hook": lambda: called.append("before")}
        with made(home, "Collector", three, **arguments) as collector:
            td = collector.rollout()
            assert (td.shape, td.names) == ((3, 4), [None, "time"])
    assert called == ["before"] * 2
    total = collector.ledger()["total"]
    assert (total["issued"], total["delivered"], collector.stats()["frames"]) == (12, 12, 12)


def test_some_environments_are_reset_alone() -> None:
    """Theirs go on with the ids that they had, those that are reset get new ones."""
    counts = []
    for home in BOTH:
        kwargs = {"frames_per_batch": 9, "total_frames": 18, "max_frames_per_traj": 50}
        with made(home, "Collector", three, **kwargs) as collector:
            stream = iter(collector)
            before = next(stream).clone()
            collector.reset(index=1)
            after = next(stream)
            counts.append(after["step_count"][..., 0].tolist())
            new = after["collector", "traj_ids"] != before["collector", "traj_ids"]
            assert new.tolist() == [[False] * 3, [True] * 3, [False] * 3]
    assert counts[0] == counts[1] == [[3, 4, 5], [0, 1, 2], [3, 4, 5]]
    total = collector.ledger()["total"]
    assert total["issued"] == total["delivered"] == 18


def test_an_index_of_one_environment_is_refused() -> None:
    refused = pytest.raises(RuntimeError, match="index: expected None")
    with made(pycollect, "Collector") as collector, refused:
        collector.reset(index=0)
    with made(pycollect, "Collector", three) as collector, pytest.raises(IndexError):
        collector.reset(index=3)


def test_the_length_of_what_has_no_end() -> None:
    for home in BOTH:
        with made(home, "Collector", total_frames=-1) as collector, pytest.raises(TypeError):
            len(collector)
        with made(home, "Collector", total_frames=25) as collector:
            assert len(collector) == 3
    buffer: dict[str, Any] = {"trajs_per_batch": 1, "max_frames_per_traj": 6}
    with made(pycollect, "Collector", **buffer) as collector:
        assert len(list(collector)) == 4  # list() asks for the length, too


@pytest.mark.parametrize("name", ["Collector"])
def test_an_environment_can_outlive_its_collector(name: str) -> None:
    for home in BOTH:
        env = pendulum()
        collector = getattr(home, name)(env, None, frames_per_batch=2, total_frames=2)
        collector.shutdown(timeout=1.0, close_env=False, raise_on_error=False)
        assert not env.is_closed
        env.reset()


def test_hooks_are_set_and_taken_away() -> None:
    for home in BOTH:
        called: list[str] = []
        with made(home, "Collector", total_frames=36) as collector:
            stream = iter(collector)
            collector.pre_collect_hook = lambda called=called: called.append("pre")
            collector.post_collect_hook = lambda td, called=called: called.append(len(td))
            next(stream)
            assert called == ["pre", 12]
            collector.pre_collect_hook = None
            next(stream)
            assert called == ["pre", 12, 12]
            collector.set_post_collect_hook(None)
            next(stream)
            assert called == ["pre", 12, 12]


def test_a_postproc_is_set() -> None:
    for home in BOTH:
        with made(home, "Collector") as collector:
            collector.postproc = lambda td: td[:5]
            assert next(iter(collector)).shape == (5,)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("post_collect_hok", print, AttributeError),
        ("post_colect_hook", print, AttributeError),
        ("postprocess", print, AttributeError),
        ("anything", 1, AttributeError),
        ("total_frames", 1, AttributeError),
        ("post_collect_hook", 3, TypeError),
        ("pre_collect_hook", "f", TypeError),
        ("postproc", 3, TypeError),
    ],
)
def test_what_cannot_be_set_says_so(name: str, value: Any, error: type[Exception]) -> None:
    with made(pycollect, "Collector") as collector, pytest.raises(error, match=name):
        setattr(collector, name, value)


def test_the_nearest_name_is_told() -> None:
    refused = pytest.raises(AttributeError, match="did you mean 'post_collect_hook'")
    with made(pycollect, "Collector") as collector, refused:
        collector.post_colect_hook = print


def test_a_class_of_the_users_sets_its_own() -> None:
    class Mine(pycollect.Collector):
        postproc_count: int

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.before = 1
            super().__init__(*args, **kwargs)
            self.after, self._hidden, self.postproc_count = 2, 3, 4

    collector = Mine(pendulum, None, frames_per_batch=2, total_frames=2)
    assert (collector.before, collector.after, collector.postproc_count) == (1, 2, 4)
    with pytest.raises(AttributeError, match="did you mean"):
        collector.post_collect_hoook = print
    collector.shutdown()


def test_a_name_that_is_empty_is_refused() -> None:
    with made(pycollect, "Collector") as collector, pytest.raises(AttributeError, match="''"):
        setattr(collector, "", 1)


@pytest.mark.parametrize("home", BOTH)
def test_the_class_of_a_collector_can_be_set(home: Any) -> None:
    class Mine(home.Collector):  # type: ignore[misc] # a base that is a variable
        pass

    with made(home, "Collector") as collector:
        collector.__class__ = Mine
        assert type(collector) is collector.__class__ is Mine
        assert next(iter(collector)).numel()


@pytest.mark.parametrize(("case"), ["nothing", "no end", "limits"])
def test_counts_are_theirs(case: str) -> None:
    reports = []
    for home in BOTH:
        with made(home, "Collector", **ARGUMENTS[case]) as collector:
            stream = iter(collector)
            own = [collector.stats()] if home is pycollect else []
            next(stream)
            own.append(collector.stats())
            reports.append(own[-1])
    theirs, ours = reports
    assert theirs.items() <= {**ours, "batches": ours["batches"]}.items()
    assert theirs.items() <= collector.stats("aggregate").items()


def test_flat_counts_of_workers() -> None:
    with made(pycollect, "Collector") as collector:
        collector.next()
        both = collector.stats(workers="both")
        assert (both["frames"], both["workers"], both["worker_0/frames"]) == (12, 1, 12)
        assert all(isinstance(value, (int, float)) for value in both.values())
        assert "frames" not in collector.stats(workers="per_worker")
        for wrong in (True, "all"):
            with pytest.raises(ValueError, match="workers"):
                collector.stats(workers=wrong)


KIN = """
import sys
import threading
import time
{first}
import pycollect
from pycollect import Collector, MultiSyncCollector, RayCollector
{second}
import gymnasium
collector = Collector(lambda: gymnasium.make("Pendulum-v1"), None, frames_per_batch=2)
assert "torchrl" not in sys.modules or {early}
import torchrl.collectors
from torchrl.collectors import BaseCollector
assert isinstance(collector, BaseCollector)
assert issubclass(Collector, BaseCollector) and issubclass(MultiSyncCollector, BaseCollector)
assert not isinstance(collector, torchrl.collectors.Collector)
assert not isinstance(object(), BaseCollector)
assert type(collector) is collector.__class__ is Collector
import torch
assert isinstance(collector, torch.utils.data.IterableDataset)
"""


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_collectors_are_kin_of_torchrls(when: str) -> None:
    """Whichever is imported first; TorchRL is not imported for that."""
    theirs = "import torchrl.collectors"
    first, second = theirs if when == "before" else "", theirs if when == "between" else ""
    program = KIN.format(first=first, second=second, early=when != "after")
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


class Probed(GymEnv):
    """Answers what it is asked, or does not."""

    def die(self) -> None:
        os._exit(3)

    def hang(self) -> None:
        time.sleep(600)

    def raise_it(self) -> None:
        raise LookupError("the environment's own")

    def lock(self) -> Any:
        return threading.Lock()


def probed() -> Any:
    return Probed("Pendulum-v1")


SEVERAL = [  # of which one is in the usual run
    pytest.param(name, marks=pytest.mark.processes)
    for name in ("MultiSyncCollector", "MultiAsyncCollector")
]
READ_OF_SEVERAL = (
    "compact_obs compiled_policy create_env_kwargs env_device exploration_type extend_buffer "
    "init_random_frames max_frames_per_traj num_workers policy_device preemptive_threshold "
    "requested_frames_per_batch reset_at_each_iter set_truncated split_trajs storing_device "
    "total_frames traj_format trajs_per_batch update_at_each_batch worker_idx num_sub_threads"
)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_workers_are_read_and_asked_as_theirs(name: str) -> None:
    """Whatever they are asked, no frame is lost."""
    asked: list[Callable[[Any], Any]] = [
        lambda c: c.getattr_env("action_spec").shape,
        lambda c: c.getattr_policy("out_keys"),
        lambda c: c.get_distant_attr("worker_idx"),
        lambda c: c.get_distant_attr("policy.module.out_features"),
        lambda c: c.map_fn("get_distant_attr", [("env.batch_size",), ("total_frames",)]),
        lambda c: c.map_fn("env.action_spec.zero"),
        lambda c: c.frames_per_batch_worker(worker_idx=1),
        lambda c: [plain(getattr(c, read)) for read in READ_OF_SEVERAL.split()],
    ]
    refused: list[tuple[Callable[[Any], Any], type[Exception]]] = [
        (lambda c: c.getattr_env("nothing_of_this_name"), AttributeError),
        (lambda c: c.getattr_policy("nothing"), AttributeError),
        (lambda c: c.get_distant_attr("env.nothing"), AttributeError),
        (lambda c: c.map_fn("nothing"), AttributeError),
        (lambda c: c.map_fn("env.raise_it"), LookupError),
        (lambda c: c.map_fn("stats", [()]), ValueError),
        (lambda c: c.fake_tensordict(), NotImplementedError),
        (lambda c: c.shutdown(close_env=False), RuntimeError),
        (lambda c: c.env, AttributeError),
    ]
    answers = []
    for home in BOTH:
        with made(home, name, [probed] * 2, device="cpu", total_frames=-1) as collector:
            next(iter(collector))
            answers.append([plain_tensor(ask(collector)) for ask in asked])
            for ask, error in refused:
                with pytest.raises(error):
                    ask(collector)
            if home is pycollect:
                only_ours(collector)
    assert answers[0] == answers[1]


def only_ours(collector: Any) -> None:
    with pytest.raises(AttributeError, match=r"call the collector's reset\(\)"):
        collector.map_fn("reset")
    with pytest.raises(TypeError, match="expected a value that pickles, got lock"):
        collector.map_fn("env.lock")
    weights = [TensorDict.from_module(linear()).data * 0 + value for value in (1.0, 2.0)]
    collector.map_fn("update_policy_weights_", [(own,) for own in weights])
    for _ in range(8):  # what was asked for before
        collector.next()
    biases = collector.get_distant_attr("policy.module.bias")
    assert [bias.item() for bias in biases] == [1.0, 2.0]
    total = collector.ledger()["total"]
    assert (total["lost"], total["issued"]) == (0, total["delivered"] + total["in_flight"])


@pytest.mark.processes
def test_a_worker_that_does_not_answer_is_replaced_and_told() -> None:
    kwargs = {"total_frames": -1, "worker_timeout": 1.0}
    with made(pycollect, "MultiSyncCollector", [probed] * 2, **kwargs) as collector:
        collector.next()
        for method, error in (("env.die", pycollect.WorkerError), ("env.hang", TimeoutError)):
            with pytest.raises(error, match="worker 0"):
                collector.map_fn("cascade_execute", [(method,), ("worker_idx",)])
            assert collector.get_distant_attr("worker_idx") == [0, 1]
            assert collector.next().shape == (2, 6)
        restarts = [own["restarts"] for own in collector.stats()["workers"].values()]
    assert restarts == [2, 0]


def write_seven(td: Any) -> None:
    td["next", "reward"].fill_(7.0)


@pytest.mark.parametrize("name", SEVERAL)
def test_hooks_of_workers_are_set_and_taken_away(name: str) -> None:
    """From the next rollout to start on, also of a worker that comes later."""
    with made(pycollect, name, [probed] * 2, total_frames=-1) as collector:
        collector.next()
        collector.post_collect_hook = write_seven
        assert collector.post_collect_hook is write_seven
        assert some(collector, lambda td: bool((td["next", "reward"] == 7).all()))
        with pytest.raises(pycollect.WorkerError):
            collector.map_fn("env.die")
        assert some(collector, lambda td: bool((td["next", "reward"] == 7).all()), 1)
        collector.post_collect_hook = None
        assert some(collector, lambda td: bool((td["next", "reward"] < 7).all()))
        for wrong in (3, partial(print, threading.Lock())):
            with pytest.raises(TypeError, match="pre_collect_hook"):
                collector.pre_collect_hook = wrong
            assert collector.pre_collect_hook is None


def some(collector: Any, holds: Callable[[Any], bool], most: int = 8) -> bool:
    """Whether it holds of one of the next batches: rollouts that were done before come first."""
    return any(holds(collector.next()) for _ in range(most))


@pytest.mark.processes
@pytest.mark.slow
def test_some_workers_are_reset_alone() -> None:
    counts = []
    for home in BOTH:
        kwargs = {"frames_per_batch": 6, "total_frames": -1, "max_frames_per_traj": 50}
        with made(home, "MultiSyncCollector", [probed] * 2, **kwargs) as collector:
            stream = iter(collector)
            next(stream)
            collector.reset([False, True])
            counts.append(next(stream)["step_count"][..., 0].tolist())
    assert counts[0] == counts[1] == [[3, 4, 5], [0, 1, 2]]
    for wrong in ([True], [True] * 3):
        collector = pycollect.MultiSyncCollector([probed] * 2, None, frames_per_batch=2)
        with pytest.raises(ValueError, match="reset_idx"):
            collector.reset(wrong)
        collector.shutdown()


@pytest.mark.parametrize("home", BOTH, ids=["theirs", "ours"])
def test_a_profile_of_the_first_rollouts(home: Any, tmp_path: Path) -> None:
    with made(home, "Collector", post_collect_hook=write_seven, total_frames=60) as collector:
        collector.enable_profile(save_path=tmp_path / "trace_{worker_idx}.json", activities=["cpu"])
        assert collector.profile_config.num_rollouts == 3
        batches = list(collector)
        assert (tmp_path / "trace_0.json").exists()
        if home is pycollect:  # theirs is not called meanwhile
            assert all((td["next", "reward"] == 7).all() for td in batches)
        with pytest.raises(RuntimeError, match="Cannot enable profiling after iteration"):
            collector.enable_profile()
        collector.disable_profile()
        assert collector.post_collect_hook is write_seven
        assert collector.profile_config is None


@pytest.mark.processes
@pytest.mark.slow
def test_a_profile_of_some_workers(tmp_path: Path) -> None:
    kwargs = {"total_frames": -1, "post_collect_hook": write_seven}
    with made(pycollect, "MultiSyncCollector", [probed] * 2, **kwargs) as collector:
        path = str(tmp_path / "trace_{worker_idx}.json")
        collector.enable_profile(save_path=path, workers=[1, 9], activities=["cpu"])
        collector.next()
        collector.disable_profile()  # the trace of what there is
        assert [file.name for file in tmp_path.iterdir()] == ["trace_1.json"]
        assert (collector.next()["next", "reward"] == 7).all()
    with pytest.raises(ValueError, match="num_rollouts"):
        pycollect.Collector(probed, None, frames_per_batch=2).enable_profile(num_rollouts=1)


DOCS = Path(__file__).parents[2] / "docs" / "coming-from-torchrl.md"


@pytest.mark.parametrize("name", ["Collector", *SEVERAL])
def test_every_public_name_is_there_or_in_the_table(name: str) -> None:
    table = DOCS.read_text()
    with made(torchrl.collectors, name, pendulum if name == "Collector" else [pendulum]) as theirs:
        names = {own for own in dir(theirs) if not own.startswith("_")}
    with made(pycollect, name, pendulum if name == "Collector" else [pendulum]) as ours:
        missing = {own for own in names if not hasattr(ours, own)}
    assert {own for own in missing if f"`{own}`" not in table} == set()


def test_every_public_name_of_ray_is_there_or_in_the_table() -> None:
    """Of its class: an instance takes a cluster."""
    pytest.importorskip("ray")
    from torchrl.collectors.distributed import RayCollector

    table = DOCS.read_text()
    names = {own for own in dir(RayCollector) if not own.startswith("_")}
    missing = {own for own in names if not hasattr(pycollect.RayCollector, own)}
    assert {own for own in missing if f"`{own}`" not in table} == set()


@pytest.mark.processes
def test_what_was_not_given_reads_as_what_is_done() -> None:
    with made(pycollect, "Collector", pendulum, policy=None) as collector:
        assert collector.policy is None
    with made(pycollect, "MultiSyncCollector", [pendulum]) as collector:
        assert collector.cat_results == "stack"
    with made(torchrl.collectors, "Collector", pendulum, policy=None) as collector:
        assert collector.policy is not None


@pytest.mark.ray
def test_actors_are_asked_hooked_and_shut_down() -> None:
    def write(td: Any) -> None:
        td["next", "reward"].fill_(7.0)

    kwargs: dict[str, Any] = {"total_frames": -1, "sync": True}
    entries = [partial(GymEnv, "Pendulum-v1")] * 2
    with made(pycollect, "RayCollector", entries, **kwargs) as collector:
        collector.next()
        assert collector.get_distant_attr("worker_idx") == [0, 1]
        assert collector.getattr_env("action_spec").shape == (1,)
        assert collector.map_fn("getattr_policy", [("in_keys",)] * 2) == [["observation"]] * 2
        assert collector.device == collector.env_device == (None, None)
        with pytest.raises(AttributeError, match=r"env\.nothing"):
            collector.map_fn("env.nothing")
        with pytest.raises(ValueError, match="Expected 2 argument entries"):
            collector.map_fn("get_distant_attr", list_of_args=[("worker_idx",)])
        collector.post_collect_hook = write
        assert (collector.next()["next", "reward"] == 7).all()
        assert collector.ledger()["total"]["lost"] == 0
        with pytest.raises(TypeError, match="shutdown_ray"):
            collector.async_shutdown(10)

        async def end() -> None:
            await collector.async_shutdown(shutdown_ray=False)

        asyncio.run(end())
        assert collector.closed
        asyncio.run(collector.async_shutdown())

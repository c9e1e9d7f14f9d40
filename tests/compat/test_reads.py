"""Attributes and methods of a collector, compared with TorchRL's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from raising import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

pytest.importorskip("torchrl.collectors")

import torchrl.collectors
from reads_support import BOTH, linear, made, pendulum, plain, plain_tensor, three
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType

import pycollect

pytestmark = pytest.mark.filterwarnings("ignore")

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
def test_attributes_equal_torchrls(case: str) -> None:
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
def test_devices_equal_torchrls(env_device: str | None, policy: str) -> None:
    """Compare the device properties and `td.device` of batches."""
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
def test_the_policys_input_has_the_same_device_as_in_torchrl(env_device: str | None) -> None:
    """Compare `td.device` in the TensorDict that the policy receives."""
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


def test_the_environment_is_the_callers_object() -> None:
    env = TransformedEnv(pendulum(), StepCounter())
    with made(pycollect, "Collector", env) as collector:
        assert collector.env is env
        collector.next()
        assert collector.getattr_env("transform") is env.transform
        assert collector.get_distant_attr("env.transform.parent.batch_size") == torch.Size([])


def test_remote_attributes_equal_torchrls() -> None:
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


def form(td: Any) -> Any:
    keys = sorted(td.keys(True, True), key=str)
    return td.shape, [(key, td[key].shape, td[key].dtype) for key in keys], td.names


@pytest.mark.parametrize(
    "case", ["nothing", "a batch", "flags", "ids", "split", "limits"], ids=lambda case: case
)
def test_a_fake_batch_equals_torchrls(case: str) -> None:
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


def test_single_environments_can_be_reset() -> None:
    """Running environments keep their ids, and reset environments get new ones."""
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
    with made(pycollect, "Collector") as collector, refused(RuntimeError, "index"):
        collector.reset(index=0)
    with made(pycollect, "Collector", three) as collector, pytest.raises(IndexError):
        collector.reset(index=3)


@pytest.mark.parametrize("name", ["Collector"])
def test_an_environment_can_outlive_its_collector(name: str) -> None:
    for home in BOTH:
        env = pendulum()
        collector = getattr(home, name)(env, None, frames_per_batch=2, total_frames=2)
        collector.shutdown(timeout=1.0, close_env=False, raise_on_error=False)
        assert not env.is_closed
        env.reset()


@pytest.mark.parametrize(("case"), ["nothing", "no end", "limits"])
def test_counts_equal_torchrls(case: str) -> None:
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


PROGRESS = (
    "stepped_frames",
    "trajectory_completed_frames",
    "trajectory_pending_frames",
    "replay_written_frames",
    "completed_trajectories",
)


def test_progress_of_trajectories_is_counted_and_restored() -> None:
    """Trajectories have 5 frames, batches 12: the newer TorchRL counts the same."""

    def progress(collector: Any) -> list[int]:
        counts = collector.stats()
        assert counts.items() >= {name: collector.stats("both")[name] for name in PROGRESS}.items()
        return [counts[name] for name in PROGRESS]

    given: dict[str, Any] = {"max_frames_per_traj": 5, "total_frames": -1}
    write: dict[str, Any] = {"replay_write_mode": "trajectory", **given}
    with made(pycollect, "Collector", replay_buffer=[], **write) as collector:
        assert progress(collector) == [0] * 5
        seen = [progress(collector) for _ in range(2) if collector.next() is None]
        state = collector.state_dict()
    assert seen == [[12, 10, 2, 10, 2], [24, 20, 4, 20, 4]]
    assert progress(collector) == [24, 20, 0, 20, 4]  # after the shutdown
    with made(pycollect, "Collector", replay_buffer=[], **write) as collector:
        collector.load_state_dict(state)
        assert progress(collector) == [24, 20, 0, 20, 4]
        collector.next()
        assert progress(collector) == [36, 30, 2, 30, 6]
    with made(pycollect, "Collector", **given) as collector:
        collector.next()
        assert progress(collector) == [12, 0, 0, 0, 0]


def test_flat_counts_of_workers() -> None:
    with made(pycollect, "Collector") as collector:
        collector.next()
        both = collector.stats(workers="both")
        assert (both["frames"], both["workers"], both["worker_0/frames"]) == (12, 1, 12)
        assert all(isinstance(value, (int, float)) for value in both.values())
        assert "frames" not in collector.stats(workers="per_worker")
        for wrong in (True, "all"):
            with refused(ValueError, "workers"):
                collector.stats(workers=wrong)


@pytest.mark.processes
def test_attributes_of_omitted_arguments() -> None:
    with made(pycollect, "Collector", pendulum, policy=None) as collector:
        assert collector.policy is None
    with made(pycollect, "MultiSyncCollector", [pendulum]) as collector:
        assert collector.cat_results == "stack"
    with made(torchrl.collectors, "Collector", pendulum, policy=None) as collector:
        assert collector.policy is not None

"""TorchRL environments on a device give the same batches as on the host.

The device is fake: its memory is the host's, and it logs its copies to the host.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from collect_support import case_name
from fake_device import FakeDevice
from raising import refused
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl_support import (
    ENVS,
    MAX_STEPS,
    Make,
    assert_same_entries,
    batched,
    collect,
    counting_policy,
)

import pycollect

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import TensorDictPrimer, TransformedEnv

# A third of them run by default; the environments also differ in their work on the host.
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if place % 3 else [])
    for place, name in enumerate(ENVS)
]


def there(patch: pytest.MonkeyPatch) -> FakeDevice:
    """Put TorchRL's environments on a fake device from now on."""
    device = FakeDevice()
    patch.setattr("pycollect.envs.torchrl.adapter.TorchRLEnv._is_on_device", True)
    patch.setattr("pycollect.envs.torchrl.adapter.accelerator", lambda _: device)
    return device


class There:
    """Make an environment in a process with a fake device."""

    def __init__(self, make: Make, shift: int = 0) -> None:
        self._make = make
        self._shift = shift

    def __call__(self) -> Any:
        from pycollect.envs.torchrl import adapter

        device = FakeDevice()
        adapter.TorchRLEnv._is_on_device = True
        adapter.accelerator = lambda _: device
        self._shift_what_is_brought()
        return self._make()

    def _shift_what_is_brought(self) -> None:
        """Shift observations of rollouts that are copied whole to the host, to detect copies."""
        from pycollect.transport import host

        bring, key = host._copy_to_slab, ("observation",)

        def bring_shifted(recorded: Any, *others: Any) -> None:
            bring({**recorded, key: recorded[key] + self._shift}, *others)

        host._copy_to_slab = bring_shifted


def batches(make: Make, policy: Any, arguments: Any) -> list[TensorDictBase]:
    return collect(pycollect.SyncDataCollector, make, policy, batches=3, **arguments)


def assert_equal_there(
    patch: pytest.MonkeyPatch, make: Make, make_policy: Any = None, **arguments: Any
) -> None:
    policies = [make_policy and make_policy() for _ in range(2)]
    here = batches(make, policies[0], arguments)
    with patch.context() as inside:
        there(inside)
        for ours, theirs in zip(batches(make, policies[1], arguments), here, strict=True):
            assert_same_entries(ours, theirs, ())


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_env(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equal_there(monkeypatch, ENVS[name])


@pytest.mark.parametrize("name", ["CountingEnv", "CountingBatchedEnv [3]", "SerialEnv"])
@pytest.mark.parametrize(
    "arguments",
    [
        MAX_STEPS,
        {**MAX_STEPS, "set_truncated": True},
        {**MAX_STEPS, "reset_at_each_iter": True},
        {"compact_obs": True, "track_policy_version": True},
        {"observation_dtype": torch.float16, "observation_scale": 0.5},
        {"split_trajs": True},
        {**MAX_STEPS, "trajs_per_batch": 2, "total_frames": -1},
    ],
    ids=case_name,
)
def test_collector_options(
    name: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "trajs_per_batch" in arguments:
        arguments = {**arguments, "total_frames": 48}
    assert_equal_there(monkeypatch, ENVS[name], **arguments)


def rewriting() -> Any:
    return TensorDictSequential(
        TensorDictModule(lambda seen: seen.double() / 2, ["observation"], ["observation"]),
        TensorDictModule(lambda seen: (seen % 1 > 0).to(torch.int8), ["observation"], ["action"]),
    )


@pytest.mark.parametrize("name", ["CountingEnv", "CountingBatchedEnv [3]"])
def test_a_policy_that_overwrites_its_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equal_there(monkeypatch, ENVS[name], rewriting, **MAX_STEPS)


def recurrent() -> Any:
    class Counter(nn.Module):
        in_keys = ("observation", "count", "is_init")
        out_keys = ("action", ("next", "count"))

        def forward(self, td: Any) -> Any:
            td["action"] = (td["count"] + td["is_init"] + td["observation"]) % 2 == 1
            return td.set(("next", "count"), td["count"] + 1)

    return Counter()


@pytest.mark.parametrize(
    ("make_policy", "arguments"),
    [
        (counting_policy, {}),
        (counting_policy, {"init_random_frames": 24}),
        (recurrent, {"policy_state": {"count": (1,)}}),
        (lambda: lambda td: td.set("action", td["observation"] % 2 == 0), {}),
    ],
    ids=["outputs", "random first", "a state", "whole"],
)
@pytest.mark.parametrize("size", [(), (3,), (2, 3)])
def test_policies(
    make_policy: Any, arguments: Any, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = batched(mock.CountingEnv, *size, max_steps=3)
    assert_equal_there(monkeypatch, make, make_policy, **arguments)


def test_a_policy_that_writes_the_envs_states(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return TransformedEnv(mock.CountingEnv(max_steps=4), TensorDictPrimer(h=Unbounded(1)))

    def make_policy() -> Any:
        return TensorDictModule(
            lambda seen, h: (seen % 2 == 0, h + 1), ["observation", "h"], ["action", ("next", "h")]
        )

    assert_equal_there(monkeypatch, make, make_policy)


@pytest.mark.parametrize("recurs", [False, True])
def test_only_flags_and_rewards_are_copied_to_the_host(
    recurs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = there(monkeypatch)
    make = batched(mock.CountingBatchedEnv, 3, max_steps=torch.tensor([3, 5, 7]))
    policy = (
        {"policy": recurrent(), "policy_state": {"count": (1,)}} if recurs else {"policy": None}
    )
    with pycollect.SyncDataCollector(make, frames_per_batch=12, **policy) as collector:
        collector.next()
        device.log.clear()
        first = collector.next()
        kept = first.clone()
        assert set(device.log) == {"host waits"}
        assert 4 <= device.log.count("host waits") <= 8  # one per step, and the resets
        assert not collector._worker.slab_leaves.states  # the host has no memory for them
        shapes = {tuple(room.shape) for room in rooms_of(collector)}
        assert shapes == {(3, 1)}
        collector.next()
        assert_same_entries(first, kept, ())  # no later batch overwrites it


def test_a_flag_of_another_name_ends_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finishing(mock.CountingEnv):
        def __init__(self) -> None:
            super().__init__(max_steps=100)
            self.done_spec = Composite(
                done=Binary(1, shape=(1,), dtype=torch.bool),
                finished=Binary(1, shape=(1,), dtype=torch.bool),
            )

        def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
            return super()._reset(tensordict).set("finished", torch.zeros(1, dtype=torch.bool))

        def _step(self, tensordict: Any) -> Any:
            return super()._step(tensordict).set("finished", self.count > 2)

    def ones_policy() -> Any:
        return TensorDictModule(torch.ones_like, ["done"], ["action"])

    assert_equal_there(monkeypatch, Finishing, ones_policy)
    with monkeypatch.context() as inside:
        there(inside)
        with pycollect.SyncDataCollector(
            Finishing, ones_policy(), frames_per_batch=12
        ) as collector:
            assert collector.next()["collector", "traj_ids"].unique().numel() > 4


def flip(rollout: TensorDictBase) -> None:
    """A hook's writes reach the batch for any recording device."""
    rollout["action"].logical_not_()


SYNC, ASYNC = "MultiSyncDataCollector", "MultiaSyncDataCollector"


@pytest.mark.parametrize(
    ("size", "collector_class", "arguments"),
    [
        ((2, 3), SYNC, {"post_collect_hook": flip, **MAX_STEPS}),
        ((), ASYNC, {"compact_obs": True, "split_trajs": True}),
        *(
            pytest.param(size, SYNC, arguments, marks=pytest.mark.slow)
            for size in [(), (2, 3)]
            for arguments in (
                {"cat_results": -1, "compact_obs": True},
                {"cat_results": 0, "set_truncated": True, **MAX_STEPS},
                {"frames_per_batch": [24, 12], "cat_results": "stack"},
            )
        ),
    ],
    ids=case_name,
)
def test_processes_copy_complete_rollouts_to_the_host(
    size: tuple[int, ...], collector_class: str, arguments: dict[str, Any]
) -> None:
    make = batched(mock.CountingEnv, *size, max_steps=3)
    arguments = {
        "frames_per_batch": 24,
        "total_frames": 96,
        "policy_state": {"count": (1,)},
        **arguments,
    }
    workers = 1 if collector_class == ASYNC else 2
    cls = getattr(pycollect, collector_class)
    results = []
    for factory in (make, There(make)):
        with cls([factory] * workers, recurrent(), **arguments) as collector:
            results.append([batch.clone() for batch in collector])
    here, over_there = results
    assert len(here) == len(over_there) > 1
    for ours, theirs in zip(over_there, here, strict=True):
        assert_same_entries(ours, theirs, ())
    assert here[-1]["count"].any()


def test_observations_are_copied_to_the_host_only_per_rollout() -> None:
    factory = There(partial(mock.CountingEnv, max_steps=3), shift=1000)
    arguments = {"frames_per_batch": 12, "total_frames": 24}
    with pycollect.MultiaSyncDataCollector([factory], None, **arguments) as collector:
        for batch in collector:
            assert (batch["observation"] >= 1000).all()
            assert (batch["next", "observation"] < 10).all()


def test_the_end_of_a_stopped_rollout_is_empty() -> None:
    class Slow(mock.CountingEnv):
        def _step(self, tensordict: Any) -> Any:
            time.sleep(0.02)
            return super()._step(tensordict)

    factories = [There(partial(env, max_steps=50)) for env in (mock.CountingEnv, Slow)]
    with pycollect.MultiSyncDataCollector(
        factories,
        recurrent(),
        policy_state={"count": (1,)},
        frames_per_batch=200,
        total_frames=600,
        preemptive_threshold=0.5,
        cat_results="stack",
    ) as collector:
        for batch in collector:
            mask = batch["collector", "mask"]
            assert mask[0].all()
            assert not mask[1].all()
            for key in ("observation", "count", ("next", "count"), "action"):
                assert not batch[key][~mask].any()
                assert batch[key][mask].any()
            counted = batch["next", "count"][mask] - batch["count"][mask]
            assert (counted == 1).all()


def rooms_of(collector: Any) -> list[torch.Tensor]:
    """Return the host memory for the env's copies."""
    (env,) = collector._worker.env.groups
    gathers = [env._gather_root, env._gather_next]
    cells = [cell.cell_contents for gather in gathers for cell in gather.__closure__]
    return [room for fetch in cells if hasattr(fetch, "_fetched") for room in fetch._fetched]


def test_an_observation_that_changes_its_form_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Growing(mock.CountingEnv):
        def _step(self, tensordict: Any) -> Any:
            out = super()._step(tensordict)
            late = bool((self.count > 2).all())
            return out.set("observation", out["observation"].double()) if late else out

    there(monkeypatch)
    with pycollect.SyncDataCollector(Growing, None, frames_per_batch=12) as collector:
        with refused(ValueError, "next.observation"):
            collector.next()
        with refused(ValueError, "next.observation"):  # a failed stream raises again
            collector.next()

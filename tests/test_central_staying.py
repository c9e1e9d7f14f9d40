"""Central inference, where batches lie on the policy's device: what no worker reads stays there.

The device is none: its memory is the host's, and what is copied to and from it is noted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collect_support import CENTRAL, GROUPS, RAY_CENTRAL, STEPS, Way, assert_equal, collecting
from echo_envs import ENTRIES, LENGTHS, EchoEnv, GateEnv, echo_fns, envs_of
from fake_device import DEVICE, FakeDevice
from state_support import POLICIES, check_states_follow_the_loop
from tensordict.nn import TensorDictModule
from test_central_device import FIRST, apart, check_interrupted_wait, side_by_side
from test_ray_nodes import ELSEWHERE, HERE, other_node
from test_restarts import killing_when
from torch import nn

from pycollect.batch.room import Room
from pycollect.devices import CPU, Begun
from pycollect.inference.server import InferenceServer
from pycollect.inference.states import StatesBeside
from pycollect.inference.staying import Staying
from pycollect.policy_stream import PolicyStream
from pycollect.scheduler import scheduler as scheduling
from pycollect.scheduler.assembly import Assembly
from pycollect.scheduler.staying import why_nothing_stays

__all__ = ["apart", "other_node"]  # fixtures

pytestmark = pytest.mark.processes(usual=2)

LEFT = ("seen", "drawn", ("deep", "is_odd"))


@pytest.fixture(autouse=True)
def there(apart: FakeDevice, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The policy is on the device that batches go to; what is noted is of the policy's steps."""
    fake.lazy = False
    monkeypatch.setattr(InferenceServer, "device", DEVICE)
    monkeypatch.setattr("pycollect.scheduler.scheduler.PolicyStream", lambda _: PolicyStream(CPU))
    return apart


class Says(nn.Module):
    """Acts by the step's parity; says what it saw, what it drew, and whether the step is odd.

    If it is given a count of steps as a state, it passes the next one on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.raises_at = 0
        self.error: type[BaseException] = KeyboardInterrupt

    def forward(self, observation: torch.Tensor, *count: torch.Tensor) -> Any:
        self.raises_at -= 1
        if self.raises_at == 0:
            raise self.error
        is_odd = observation[..., 1:].sum(-1) % 2
        drawn = torch.randint(1, 1 << 40, (*is_odd.shape, 2))
        counted = [own + 1 for own in count]
        return is_odd.long(), observation * self.scale, drawn, is_odd.bool(), *counted


def saying(counts: bool = True) -> tuple[Says, TensorDictModule]:
    module = Says()
    read, passed_on = (["count"], [("next", "count")]) if counts else ([], [])
    outputs = ["action", *LEFT, *passed_on]
    return module, TensorDictModule(module, ["observation", *read], outputs)


@contextmanager
def staying(way: Way, entry: Any, *, frames: int, **arguments: Any) -> Iterator[Any]:
    policy = arguments.pop("policy", None) or saying()[1]
    arguments.setdefault("storing_device", DEVICE)
    if "count" in policy.in_keys:
        arguments.setdefault("policy_state", {"count": torch.tensor([float(FIRST)])})
    with collecting(way, entry, policy, frames=frames, **arguments) as collector:
        yield collector


def noting(rooms: list[Room]) -> Any:
    """`Room.filled`, which notes the room."""
    plain = Room.filled

    def filled(room: Room, ids: torch.Tensor) -> Any:
        rooms.append(room)
        return plain(room, ids)

    return filled


class SlowEnv(EchoEnv):
    """An EchoEnv that takes its time."""

    def __init__(self, seconds: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


def seen_by_nobody(rollout: Any) -> None:
    """A hook that is shown whole rollouts."""


def told(value: Any) -> str:
    """Of a parameter: as it is called; of arguments their names."""
    return (
        value.name
        if isinstance(value, Way)
        else value
        if isinstance(value, str)
        else ", ".join(value)
    )


def check_says(batch: Any) -> None:
    """Every frame has what was said of it; uncollected cells are zeros."""
    collected = batch["collector", "traj_ids"] >= 0
    frames, rest = batch[collected], batch[~collected]
    assert len(frames)
    assert torch.equal(frames["seen"], frames["observation"])
    assert torch.equal(frames["deep", "is_odd"], frames["action"].bool())
    assert (frames["drawn"] > 0).all()
    assert len(frames["drawn"].unique()) == 2 * len(frames)
    if "count" in frames:
        assert torch.equal(frames["count"], frames["observation"][..., 2:].float() + FIRST)
        assert torch.equal(frames["next", "count"], frames["count"] + 1)
    for key in rest.keys(True, True):
        if key != ("collector", "traj_ids"):
            assert not rest[key].any(), key


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize(
    ("way", "kind", "arguments"),
    [
        (CENTRAL, "one", {}),
        (CENTRAL, "one", {"cat_results": 0}),
        (CENTRAL, "one", {"split_trajs": True}),
        (CENTRAL, "list", {"max_frames_per_traj": 2, "track_policy_version": True}),
        (CENTRAL, "list", {"cat_results": 0, "split_trajs": True}),
        (CENTRAL, "list", {"cat_results": -1, "set_truncated": True}),
        (CENTRAL, "list", {"init_random_frames": 6 * STEPS, "reset_at_each_iter": True}),
        (CENTRAL, "list", {"max_batch_size": 3}),
        (CENTRAL, "list", {"observation_dtype": torch.float16, "compact_obs": True}),
        (CENTRAL, "list", {"postproc": lambda td: td.exclude("seen")}),
        (CENTRAL, "list", {"prefetch": 1}),
        (CENTRAL, "SyncVectorEnv NEXT_STEP", {}),
        (CENTRAL, "SyncVectorEnv SAME_STEP", {}),
        (CENTRAL, "ignores masks", {}),
        (CENTRAL, "ignores masks", {"drop_uncollected": True}),
        (CENTRAL, "ignores masks", {"cat_results": -1, "split_trajs": True}),
        (CENTRAL, "pool of 3", {}),
        (GROUPS, "list", {}),
        (GROUPS, "list", {"cat_results": -1, "max_frames_per_traj": 2}),
        (GROUPS, "list", {"prefetch": 1}),
    ],
    ids=told,
)
@pytest.mark.filterwarnings("ignore:create_env_fn")
def test_the_same_batches(way: Way, kind: str, arguments: dict[str, Any], counts: bool) -> None:
    envs, _ = envs_of(kind)

    def batches() -> list[Any]:
        given = {**arguments, "policy": saying(counts)[1]}
        with staying(way, ENTRIES[kind], frames=envs * STEPS, **given) as collector:
            collector.set_seed(3)
            return [collector.next() for _ in range(4)]

    filled: list[Room] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Room, "filled", noting(filled))
        ours = batches()
        assert len(filled) == (
            0 if kind.startswith("pool") else 3 if "init_random" in str(arguments) else 4
        )
        patch.setattr(scheduling, "why_nothing_stays", lambda *_: "as it was")
        filled.clear()
        theirs = batches()
        assert not filled
    for own, other in zip(ours, theirs, strict=True):
        assert_equal(own, other)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("places", "left"),
    [
        pytest.param(HERE, [True, True], marks=pytest.mark.slow),
        ([HERE, ELSEWHERE], [True, False]),
        pytest.param(ELSEWHERE, [False, False], marks=pytest.mark.slow),
    ],
    ids=["here", "both", "there"],
)
def test_actors_here_and_on_another_node(
    other_node: Any, places: Any, left: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver's policy says of workers here stays, whoever else is in the batch."""
    told: list[list[bool]] = []
    plain = Assembly._left

    def noted(own: Assembly, pending: Any, whole: Any, reports: Any) -> Any:
        told.append([report.left for report in reports])
        return plain(own, pending, whole, reports)

    monkeypatch.setattr(Assembly, "_left", noted)
    entry, batches = ENTRIES["list"], 3
    with staying(RAY_CENTRAL, entry, frames=3 * STEPS, remote_configs=places) as collector:
        for _ in range(batches):
            check_says(collector.next())
    assert told == [left] * batches


@pytest.mark.parametrize("counts", [False, True])
def test_the_action_alone_comes_down(
    counts: bool, there: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a state goes up only where an environment begins anew."""
    with (
        monkeypatch.context() as patch,
        staying(CENTRAL, ENTRIES["list"], frames=3 * STEPS, policy=saying(counts)[1]) as collector,
    ):
        collector.next()
        there.note_copies(patch)
        there.log.clear()
        batch = collector.next()
        check_says(batch)
        copies, waits = list(there.copies), there.log.count("host waits")
    begin = (batch["observation"][..., 2] == 0).sum((0, 1)).tolist()
    assert any(begin)
    assert not all(begin)
    expected = []
    for count in begin:
        if counts and count:  # which environments these are, and the count of each
            expected.append(f"up {side_by_side(8 * count, 4 * count)}")
        expected += [f"up {6 * 12}", f"down {6 * 8}"]
    assert copies == expected
    assert waits == STEPS


def test_what_stays_does_not_go_up(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a part of it travel while others collect."""
    monkeypatch.setattr("pycollect.batch.upload.LEAST_PART", 8)
    skipped: list[int] = []
    plain = Begun.skip

    def skip(begun: Begun, part: slice) -> None:
        skipped.append(part.stop - part.start)
        plain(begun, part)

    monkeypatch.setattr(Begun, "skip", skip)
    frames = 6 * STEPS
    with staying(CENTRAL, ENTRIES["list"], frames=3 * STEPS) as collector:
        for _ in range(3):
            skipped.clear()
            check_says(collector.next())
            assert sorted(skipped) == [own * frames for own in (1, 4, 4, 12, 16)]


def test_what_stays_has_not_travelled_where_it_is_brought_to_the_host(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two workers, of which one shows its rollouts to a hook, and both travel at once."""
    monkeypatch.setattr("pycollect.batch.upload.LEAST_PART", 8)
    monkeypatch.setattr(FakeDevice, "pin", lambda *_: True)

    def entry(worker: int) -> Any:
        slow = 0.02 * (1 - worker)
        return [partial(SlowEnv, slow, 10 * worker + p, LENGTHS) for p in range(2)]

    with staying(CENTRAL, entry, frames=2 * STEPS) as collector:
        for shown in (0, 1):
            hooks = [[seen_by_nobody] if worker == shown else [None] for worker in range(2)]
            collector.map_fn("set_post_collect_hook", hooks)
            for _ in range(3):
                fake.log.clear()
                check_says(collector.next())
                assert "part" in fake.log


@pytest.mark.parametrize("way", [CENTRAL, GROUPS], ids=lambda way: way.name)
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_place_of_a_worker_that_died(way: Way, ahead: int, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def entry(worker: int) -> Any:
        fns: list[Any] = [partial(EchoEnv, 10 * worker + p, LENGTHS) for p in range(2)]
        waits = partial(GateEnv, gate, STEPS + 3, number=11, length=LENGTHS)
        return [fns[0], waits] if worker else fns

    with staying(way, entry, frames=2 * STEPS, prefetch=ahead) as collector:
        check_says(collector.next())
        pid = collector.stats()["workers"][1]["pid"]
        killer = killing_when(gate.with_suffix(".reached"), pid, then=gate)
        for _ in range(3):
            check_says(collector.next())
        killer.join()
        assert collector.stats()["workers"][1]["restarts"] == 1
        os.kill(collector.stats()["workers"][0]["pid"], signal.SIGKILL)
        for _ in range(4):
            check_says(collector.next())
        assert collector.stats()["workers"][0]["restarts"] == 1


@pytest.mark.parametrize("way", [CENTRAL, GROUPS], ids=lambda way: way.name)
@pytest.mark.parametrize(
    "arguments",
    [
        {"preemptive_threshold": 0.5},
        {"preemptive_threshold": 0.5, "prefetch": 1, "max_frames_per_traj": 2},
        {"preemptive_threshold": 0.5, "min_batch_size": 1},
        {"min_batch_size": 1, "prefetch": 1},
        {"preemptive_threshold": 0.5, "cat_results": -1},
    ],
    ids=str,
)
def test_rollouts_that_end_early(way: Way, arguments: dict[str, Any]) -> None:
    def entry(worker: int) -> Any:
        return [partial(SlowEnv, 0.01 * worker, 10 * worker + p, LENGTHS) for p in range(3)]

    with staying(way, entry, frames=3 * 8, **arguments) as collector:
        collector.next()
        batches = [collector.next() for _ in range(5)]
    for batch in batches:
        check_says(batch)
    if arguments.get("cat_results") != -1 and "preemptive_threshold" in arguments:
        assert any((own["collector", "traj_ids"] < 0).any() for own in batches)


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_is_dropped_is_not_written(ahead: int) -> None:
    module, policy = saying()
    arguments = {"policy": policy, "prefetch": ahead, "max_frames_per_traj": 3}
    with staying(GROUPS, ENTRIES["list"], frames=3 * STEPS, **arguments) as collector:
        for act in (collector.reset, partial(collector.set_seed, 1), lambda: None):
            check_says(collector.next())
            act()
            check_says(collector.next())
            module.raises_at = 4
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            act()
            check_says(collector.next())
        collector.load_state_dict(collector.state_dict())
        check_says(collector.next())


def test_an_interrupt_while_the_device_is_waited_for(there: FakeDevice) -> None:
    with staying(CENTRAL, ENTRIES["list"], frames=3 * STEPS) as collector:
        check_interrupted_wait(collector, there, check_says)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Room, "write"), (Staying, "take_read"), (StatesBeside, "_put"), (Staying, "take")],
    ids=lambda own: own if isinstance(own, str) else own.__name__,
)
@pytest.mark.parametrize("arguments", [{}, {"max_batch_size": 3}], ids=str)
def test_an_interrupt_before_states_are_kept(
    kind: Any, name: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, left = getattr(kind, name), 0

    def interrupted(own: Any, *given: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return plain(own, *given)

    monkeypatch.setattr(kind, name, interrupted)
    with staying(CENTRAL, ENTRIES["list"], frames=3 * STEPS, **arguments) as collector:
        check_says(collector.next())
        for n in (1, 2, 5, 6):
            left = n
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            for _ in range(2):
                check_says(collector.next())


def test_weights_are_live() -> None:
    module, policy = saying()
    with staying(CENTRAL, ENTRIES["one"], frames=STEPS, policy=policy) as collector:
        check_says(collector.next())
        with torch.no_grad():
            module.scale.fill_(3)
        batch = collector.next()
        assert torch.equal(batch["seen"], 3 * batch["observation"])
        collector.update_policy_weights_({"module.scale": torch.ones(1)})
        check_says(collector.next())


def test_a_hook_is_shown_all(tmp_path: Path) -> None:
    """One that was set later, too, by whatever means, and for some workers alone."""
    path = tmp_path / "shown"

    def hook(rollout: Any) -> None:
        check_says(rollout)
        rollout["drawn"].neg_()
        with open(path, "a") as file:
            file.write(".")

    def signs(batch: Any) -> list[bool]:
        return [bool((own["drawn"] < 0).all()) for own in batch.unbind(0)]

    with staying(CENTRAL, ENTRIES["list"], frames=3 * STEPS) as collector:
        check_says(collector.next())
        collector.map_fn("set_post_collect_hook", [[None], [hook]])
        batch = collector.next()
        assert signs(batch) == [False, True]
        batch["drawn"][1].neg_()
        check_says(batch)
        collector.set_post_collect_hook(hook)
        assert signs(collector.next()) == [True, True]
        collector.set_post_collect_hook(None)
        check_says(collector.next())
    assert path.read_text() == "..."
    with staying(CENTRAL, ENTRIES["list"], frames=3 * STEPS, post_collect_hook=hook) as collector:
        assert signs(collector.next()) == [True, True]


def test_workers_come_and_go() -> None:
    with staying(CENTRAL, echo_fns, frames=3 * STEPS) as collector:
        check_says(collector.next())
        collector.add_collectors([echo_fns(2)])
        with pytest.warns(UserWarning, match="3 workers from the next batch on"):
            check_says(collector.next())
        with pytest.warns(UserWarning, match="2 workers from the next batch on"):
            collector.remove_collectors([0])
        for _ in range(3):
            check_says(collector.next())


def test_what_a_policy_raises_loses_nothing_else() -> None:
    module, policy = saying()
    arguments = {"policy": policy, "restart_on_error": True}
    with staying(CENTRAL, ENTRIES["list"], frames=3 * STEPS, **arguments) as collector:
        check_says(collector.next())
        module.raises_at, module.error = 3, ZeroDivisionError
        check_says(collector.next())
        assert collector.stats()["workers"][0]["restarts"] == 1
        check_says(collector.next())


@pytest.mark.parametrize("name", POLICIES)
def test_states_follow_the_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[Room] = []
    monkeypatch.setattr(Room, "filled", noting(rooms))
    check_states_follow_the_loop(CENTRAL, "list", name, storing_device=DEVICE)
    _, shapes = POLICIES[name]
    for room in rooms:
        assert {*room.tensors} >= {*((key,) for key in shapes), *(("next", key) for key in shapes)}
    assert rooms


def test_what_nobody_is_shown_of_a_policys_states() -> None:
    """A state that no batch has, and one in whose place the policy writes what it says."""
    module = TensorDictModule(
        lambda seen, own, old: ((own[..., 0] % 2).long(), own + 1, old + 100, own + 10),
        ["observation", "_own", "old"],
        ["action", ("next", "_own"), "old", ("next", "old")],
    )
    arguments = {"policy": module, "policy_state": {"_own": (1,), "old": (1,)}}
    with staying(GROUPS, ENTRIES["list"], frames=3 * STEPS, **arguments) as collector:
        for _ in range(3):
            batch = collector.next()
            step = batch["observation"][..., 2:].float()
            assert torch.equal(batch["action"], (step[..., 0] % 2).long())
            assert torch.equal(batch["next", "old"], step + 10)
            assert torch.equal(batch["old"], torch.where(step > 0, step + 9, 0) + 100)
            assert "_own" not in batch


def test_random_actions_go_on_from_states_that_were_left() -> None:
    """And the policy from the zeros that they pass on."""
    arguments = {"init_random_frames": 6 * STEPS}
    with staying(CENTRAL, ENTRIES["list"], frames=3 * STEPS, **arguments) as collector:
        begun = collector.state_dict()
        collector.next()
        left = [collector.next() for _ in range(2)][-1]
        check_says(left)
        collector.load_state_dict(begun)
        drawn = collector.next()
        goes_on = drawn["observation"][..., 0, 2] > 0
        assert torch.equal(
            drawn["count"][..., 0, :][goes_on], left["next", "count"][..., -1, :][goes_on]
        )
        assert not drawn["next", "count"].any()
        after = collector.next()
        goes_on = after["observation"][..., 0, 2] > 0
        assert goes_on.any()
        assert not after["count"][..., 0, :][goes_on].any()


def test_why_nothing_stays() -> None:
    def reason(**arguments: Any) -> str:
        told: list[str] = []

        def noted(*given: Any) -> str:
            told.append(why_nothing_stays(*given))
            return "all comes down"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduling, "why_nothing_stays", noted)
            entries = [ENTRIES["list"](w) for w in range(2)]
            with CENTRAL.collector(
                entries,
                saying(counts=False)[1],
                frames_per_batch=18,
                **{"storing_device": DEVICE, **arguments},
            ):
                return told[0]

    assert reason() == ""
    assert "batches lie on another device" in reason(storing_device=None)
    assert "batches lie on another device" in reason(storing_device="cpu")
    assert "hook" in reason(post_collect_hook=print)
    assert "trajectories" in reason(trajs_per_batch=2, max_frames_per_traj=3)
    assert "replay buffer" in reason(replay_buffer=[])
    assert "uncollected cells" in reason(preemptive_threshold=0.5, cat_results=-1)
    assert reason(preemptive_threshold=0.5) == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InferenceServer, "device", torch.device("cpu"))
        assert "on the CPU" in reason(storing_device=None)

"""Central inference with a policy on another device: its copies, and states that stay there.

The device is fake: it uses host memory and logs the copies from and to the device.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collect_support import CENTRAL, GROUPS, STEPS, Way, collecting
from echo_envs import ENTRIES, LENGTHS, EchoEnv, GateEnv, echo_fns, envs_of
from fake_device import FakeDevice, place_policies_on
from state_support import POLICIES, check_states_follow_the_loop, seeded
from tensordict.nn import TensorDictModule
from test_restarts import killing_when
from torch import nn

from pycollect.inference.group import ServerStates
from pycollect.policy.device import DeviceTransfer

pytestmark = pytest.mark.processes(usual=2)

FIRST = 5  # initial count of a trajectory


class Apart(DeviceTransfer):
    """Treat the policy and its stored states as on a device, although they share host memory."""

    is_separate = True

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return any(tensor is own for _, own in self._stored)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Place every policy of this process on another device than its environments."""
    device = FakeDevice()
    place_policies_on(device, monkeypatch, Apart)
    return device


class Counting(nn.Module):
    """Count the steps of each trajectory in a state; raise in call number `raises_at`."""

    def __init__(self) -> None:
        super().__init__()
        self.raises_at, self.error = 0, BaseException()

    def forward(self, observation: torch.Tensor, count: torch.Tensor) -> Any:
        self.raises_at -= 1
        if self.raises_at == 0:
            raise self.error
        return (count[..., 0] % 2).long(), count + 1


def counting() -> tuple[Counting, dict[str, Any]]:
    """Return the module, and the collector arguments that use it."""
    module = Counting()
    policy = TensorDictModule(module, ["observation", "count"], ["action", ("next", "count")])
    return module, {"policy": policy, "policy_state": {"count": torch.tensor([float(FIRST)])}}


def check_counts(batch: Any) -> None:
    """Check that each state counts the steps of its trajectory."""
    mask = batch.get(("collector", "mask"), None)
    frames = batch[mask] if mask is not None else batch.flatten()
    assert len(frames)
    steps = frames["observation"][..., 2:].float()
    assert torch.equal(frames["count"], steps + FIRST)
    assert torch.equal(frames["next", "count"], steps + FIRST + 1)


def side_by_side(*sizes: int) -> int:
    """Return the total bytes of tensors that each start at a multiple of 64."""
    return sum(-(-own // 64) * 64 for own in sizes[:-1]) + sizes[-1]


@pytest.mark.parametrize("kind", ["one", "list"])
@pytest.mark.parametrize("name", POLICIES)
def test_states_follow_the_loop(kind: str, name: str, apart: FakeDevice) -> None:
    check_states_follow_the_loop(CENTRAL, kind, name)


def test_copies_per_step(apart: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Observations are uploaded in one copy; states only for environments that restart."""
    policy, _ = seeded("LSTMCell")
    with (
        monkeypatch.context() as patch,
        collecting(CENTRAL, ENTRIES["list"], policy, frames=3 * STEPS) as collector,
    ):
        apart.note_copies(patch)
        batches = [collector.next().clone() for _ in range(2)]
        copies, waits = list(apart.copies), apart.log.count("host waits")
    begin = torch.cat([own["observation"][..., 2] == 0 for own in batches], -1).sum((0, 1))
    assert begin[0] == 6
    assert 0 < sum(begin[1:] > 0) < 2 * STEPS - 1
    expected = []
    for count in begin.tolist():
        if count:  # their indices, and four numbers of each state
            expected.append(f"up {side_by_side(8 * count, 16 * count, 16 * count)}")
        expected += [f"up {6 * 12}", f"down {side_by_side(6 * 8, 6 * 16, 6 * 16)}"]
    assert copies == expected
    assert waits == 2 * STEPS


@pytest.mark.parametrize(
    ("way", "kind", "arguments"),
    [
        (CENTRAL, "one", {}),
        (CENTRAL, "list", {"max_frames_per_traj": 2}),
        (CENTRAL, "list", {"reset_at_each_iter": True}),
        (CENTRAL, "list", {"max_batch_size": 3}),
        (CENTRAL, "list", {"min_batch_size": 1}),
        (CENTRAL, "list", {"preemptive_threshold": 0.5}),
        (CENTRAL, "SyncVectorEnv NEXT_STEP", {}),
        (CENTRAL, "SyncVectorEnv SAME_STEP", {}),
        (CENTRAL, "ignores masks", {}),
        (CENTRAL, "ignores masks", {"drop_uncollected": True}),
        (CENTRAL, "pool of 3", {}),
        (CENTRAL, "pool of 3", {"max_frames_per_traj": 2}),
        (GROUPS, "list", {}),
        (GROUPS, "list", {"min_batch_size": 1, "max_frames_per_traj": 2}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:create_env_fn")
def test_states_of_every_kind_of_environment(
    way: Way, kind: str, arguments: dict[str, Any], apart: FakeDevice
) -> None:
    envs, _ = envs_of(kind)
    _, own = counting()
    frames = envs * STEPS
    with collecting(way, ENTRIES[kind], frames=frames, **own, **arguments) as collector:
        for _ in range(4):
            check_counts(collector.next())
        collector.reset()
        check_counts(collector.next())
        collector.set_seed(1)
        check_counts(collector.next())


def test_states_after_initial_random_actions(apart: FakeDevice) -> None:
    """Random steps return zeros as states, which differ from the initial values."""
    _, own = counting()
    arguments = {**own, "init_random_frames": 6 * STEPS, "reset_at_each_iter": True}
    with collecting(CENTRAL, ENTRIES["list"], frames=3 * STEPS, **arguments) as collector:
        assert not collector.next()["next", "count"].any()
        for _ in range(2):
            check_counts(collector.next())


@pytest.mark.parametrize("way", [CENTRAL, GROUPS], ids=lambda way: way.name)
def test_states_of_a_replacement_worker(way: Way, apart: FakeDevice, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def entry(worker: int) -> Any:
        fns: list[Any] = [partial(EchoEnv, 10 * worker + p, LENGTHS) for p in range(2)]
        waits = partial(GateEnv, gate, STEPS + 3, number=11, length=LENGTHS)
        return [fns[0], waits] if worker else fns

    _, own = counting()
    with collecting(way, entry, frames=2 * STEPS, **own) as collector:
        check_counts(collector.next())
        pid = collector.stats()["workers"][1]["pid"]
        killer = killing_when(gate.with_suffix(".reached"), pid, then=gate)
        for _ in range(3):
            check_counts(collector.next())
        killer.join()
        assert collector.stats()["workers"][1]["restarts"] == 1
        os.kill(collector.stats()["workers"][0]["pid"], signal.SIGKILL)
        for _ in range(3):
            check_counts(collector.next())
        assert collector.stats()["workers"][0]["restarts"] == 1


def test_states_of_a_policy_that_raised(apart: FakeDevice) -> None:
    module, own = counting()
    arguments = {**own, "restart_on_error": True}
    with collecting(CENTRAL, ENTRIES["list"], frames=3 * STEPS, **arguments) as collector:
        check_counts(collector.next())
        for error in (ZeroDivisionError("by the policy"), KeyboardInterrupt()):
            module.raises_at, module.error = 3, error
            try:
                check_counts(collector.next())
            except KeyboardInterrupt:
                check_counts(collector.next())
            check_counts(collector.next())
        assert collector.stats()["workers"][0]["restarts"] == 1


def test_a_state_does_not_advance_with_an_undelivered_answer(apart: FakeDevice) -> None:
    """The policy's output is refused after the device has stored the next state.

    The previous state equals the initial one, so the slots in shared memory do not reveal the
    error.
    """
    calls_left = [0]

    def toggle(observation: torch.Tensor, is_odd: torch.Tensor) -> Any:
        calls_left[0] -= 1
        part = observation[..., : 2 if calls_left[0] == 0 else 1]
        return is_odd[..., 0].long(), part, 1 - is_odd

    outs = ["action", "part", ("next", "is_odd")]
    policy = TensorDictModule(toggle, ["observation", "is_odd"], outs)
    arguments = {"policy_state": {"is_odd": (1,)}, "restart_on_error": True}
    with collecting(
        CENTRAL, lambda worker: partial(EchoEnv, 10 * worker, (9,)), policy, frames=6, **arguments
    ) as collector:
        collector.next()
        calls_left[0] = 1  # the first call of a rollout, after an even number of calls
        for _ in range(2):
            batch = collector.next()
            assert torch.equal(batch["is_odd"], batch["observation"][..., 2:] % 2)
        assert collector.stats()["workers"][0]["restarts"] == 1


def test_an_interrupt_while_the_device_is_waited_for(apart: FakeDevice) -> None:
    """The device has stored the next states, but no worker has received its reply."""
    _, own = counting()
    with collecting(CENTRAL, ENTRIES["list"], frames=3 * STEPS, **own) as collector:
        check_counts(collector.next())
        apart.interrupts = 3
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        check_counts(collector.next())
        check_counts(collector.next())


@pytest.mark.parametrize("name", ["_read", "store"])
@pytest.mark.parametrize("arguments", [{}, {"max_batch_size": 3}], ids=str)
def test_an_interrupt_before_states_are_kept(
    name: str, arguments: dict[str, Any], apart: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, left = getattr(ServerStates, name), 0

    def interrupted(own: Any, *given: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return plain(own, *given)

    monkeypatch.setattr(ServerStates, name, interrupted)
    _, own = counting()
    with collecting(CENTRAL, ENTRIES["list"], frames=3 * STEPS, **own, **arguments) as collector:
        check_counts(collector.next())
        for n in (1, 2):
            left = n
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            for _ in range(2):
                check_counts(collector.next())


def test_states_that_no_batch_has_or_that_outputs_replace(apart: FakeDevice) -> None:
    module = TensorDictModule(
        lambda seen, own, old: ((own[..., 0] % 2).long(), own + 1, old + 100, own + 10),
        ["observation", "_own", "old"],
        ["action", ("next", "_own"), "old", ("next", "old")],
    )
    arguments = {"policy": module, "policy_state": {"_own": (1,), "old": (1,)}}
    with collecting(GROUPS, ENTRIES["list"], frames=3 * STEPS, **arguments) as collector:
        for _ in range(3):
            batch = collector.next()
            step = batch["observation"][..., 2:].float()
            assert torch.equal(batch["action"], (step[..., 0] % 2).long())
            assert torch.equal(batch["next", "old"], step + 10)
            assert torch.equal(batch["old"], torch.where(step > 0, step + 9, 0) + 100)
            assert "_own" not in batch


def test_states_when_workers_are_added_and_removed(apart: FakeDevice) -> None:
    _, own = counting()
    with collecting(CENTRAL, echo_fns, frames=3 * STEPS, **own) as collector:
        check_counts(collector.next())
        collector.add_collectors([echo_fns(2)])
        with pytest.warns(UserWarning, match="3 workers"):
            check_counts(collector.next())
        with pytest.warns(UserWarning, match="2 workers"):
            collector.remove_collectors([0])
        for _ in range(2):
            check_counts(collector.next())

"""Vector environments of tensors: the same batches as from environments of numpy arrays."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from collect_support import case_name
from gpu_support import DEVICE
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from raising import refused, warned
from tensor_envs import (
    ARGUMENTS,
    ENVS,
    STEPS,
    CountingArrays,
    CountingTensors,
    assert_same,
    collected,
    doubling,
    record_as_on_a_device,
)
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

import pycollect

MODES = ("SAME_STEP", "NEXT_STEP", "SKIPPING", "DISABLED")


@pytest.fixture(params=["cpu", pytest.param(DEVICE, marks=pytest.mark.cuda, id="gpu")])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Device of the environment's tensors. Without a GPU, the second one only acts like it."""
    if request.param_index == 1 and DEVICE == "cpu":
        record_as_on_a_device(monkeypatch)
    return str(request.param)


def assert_as_arrays(device: str, policy: Callable[[], Any], *env: Any, **arguments: Any) -> None:
    """Compare with the environment of arrays; other tests check its batches."""
    own = policy()
    own = own.to(device) if isinstance(own, nn.Module) else own
    tensors = collected(partial(CountingTensors, *env, device=device), own, **arguments)
    assert_same(tensors, collected(partial(CountingArrays, *env), policy(), **arguments))


@pytest.mark.filterwarnings("ignore:trajs_per_batch")
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=case_name)
@pytest.mark.parametrize("mode", MODES)
def test_batches_equal_those_of_arrays(device: str, mode: str, arguments: dict[str, Any]) -> None:
    if mode == "SKIPPING" and "max_frames_per_traj" in arguments:
        pytest.skip("it cannot reset single rows")
    assert_as_arrays(device, lambda: doubling, mode, **arguments)


def stepping() -> TensorDictModule:
    """A policy that reads the collector's own entries."""

    def act(observation: torch.Tensor, first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return first * 4 + count + observation[..., 1:] / 8

    return TensorDictModule(act, ["observation", "is_init", "step_count"], ["action"])


class Counter(nn.Module):
    in_keys = ("observation", "count", "is_init")
    out_keys = ("action", ("next", "count"))

    def forward(
        self, observation: torch.Tensor, count: torch.Tensor, is_init: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = torch.where(is_init, 1.0, count + 1)
        return count * 0.5 + observation[..., :1] * 0, count


def recurrent() -> TensorDictModule:
    return TensorDictModule(Counter(), list(Counter.in_keys), list(Counter.out_keys))


@pytest.mark.parametrize("mode", MODES)
def test_a_policy_reads_counts_and_first_steps(device: str, mode: str) -> None:
    if mode in ("SAME_STEP", "DISABLED"):
        arguments = {"max_frames_per_traj": 5}
        assert_as_arrays(device, stepping, mode, **arguments)
    assert_as_arrays(device, recurrent, mode, policy_state={"count": torch.zeros(1)})


def test_an_output_may_be_a_view_of_an_input(device: str) -> None:
    def act(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return doubling(observation), observation[:, :1]

    assert_as_arrays(device, lambda: TensorDictModule(act, ["observation"], ["action", "episode"]))


def test_random_actions(device: str) -> None:
    assert_as_arrays(device, lambda: None)


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_single_rows_are_reset_between_batches(device: str, mode: str) -> None:
    def batches(make: Callable[[], Any]) -> list[TensorDictBase]:
        with pycollect.SyncDataCollector(
            make, doubling, frames_per_batch=STEPS * ENVS, total_frames=-1
        ) as collector:
            collector.set_seed(3)
            collector.reset([0, 3])
            first = next(collector).cpu().clone()
            collector.reset([1, 3])
            return [first, next(collector).cpu().clone(), next(collector).cpu().clone()]

    ours = batches(partial(CountingTensors, mode, device=device))
    for own, other in zip(ours, batches(partial(CountingArrays, mode)), strict=True):
        assert (own == other).all()


@pytest.mark.parametrize(("steps", "envs"), [(1, ENVS), (STEPS, 1), (1, 1)])
def test_batches_of_one_step_or_environment_stay_as_they_are(
    steps: int, envs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensor_envs.ENVS", envs)
    with pycollect.SyncDataCollector(
        partial(CountingTensors, device=device),
        doubling,
        frames_per_batch=steps * envs,
        total_frames=6 * steps * envs,
    ) as collector:
        pairs = [(batch, batch.cpu().clone()) for batch in collector]
    for kept, copied in pairs:
        assert (kept.cpu() == copied).all()


def test_last_observations_may_come_row_by_row(device: str) -> None:
    assert_as_arrays(device, lambda: doubling, "SAME_STEP", "each")


class Other(CountingArrays):
    """The environment of arrays for another kind of tensors."""

    def __init__(self, kind: Callable[[], CountingTensors]) -> None:
        self._env = kind()


class Pending(CountingTensors):
    """Keep pending resets over a reset, like AsyncVectorEnv without shared memory."""

    def __init__(self) -> None:
        super().__init__("SKIPPING")

    def reset(self, **arguments: Any) -> Any:
        pending = self._ended.clone()
        result = super().reset(**arguments)
        self._ended.copy_(pending)
        return result


def test_pending_resets_are_done_before_a_reset() -> None:
    ours = collected(Pending, doubling, reset_at_each_iter=True)
    assert_same(ours, collected(partial(Other, Pending), doubling, reset_at_each_iter=True))


class Stating(CountingTensors):
    """Declare NEXT_STEP, but reset in the same step."""

    def __init__(self, final: bool = True) -> None:
        super().__init__("SAME_STEP", final)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self._masks = False


class EndingAgain(CountingTensors):
    """End rows in the step that resets them."""

    def __init__(self) -> None:
        super().__init__("SKIPPING")

    def step(self, actions: Any) -> Any:
        ended = self._ended.clone()
        shown, reward, terminated, truncated, info = super().step(actions)
        return shown, reward, terminated | ended, truncated, info


@pytest.mark.parametrize("kind", [Stating, EndingAgain])
def test_an_environment_that_contradicts_its_mode_is_refused(kind: Any) -> None:
    for make in (kind, partial(Other, kind)):
        with refused(ValueError, "autoreset_mode"):
            collected(make, doubling)


def test_a_reward_in_a_step_that_only_resets_causes_a_warning() -> None:
    with warned("autoreset_mode"):
        collected(partial(Stating, False), doubling)


def test_an_overwritten_last_observation_is_reported() -> None:
    class Overwritten(CountingTensors):
        def step(self, actions: Any) -> Any:
            *values, _ = super().step(actions)
            return *values, {"final_obs": values[0]}

    for make in (Overwritten, partial(Other, Overwritten)):
        with warned("create_env_fn"):
            collected(make, doubling)


def test_frames_of_an_interrupted_rollout_count_as_stepped() -> None:
    class Interrupted(CountingTensors):
        left = 4

        def step(self, actions: Any) -> Any:
            Interrupted.left -= 1
            if not Interrupted.left:
                raise KeyboardInterrupt
            return super().step(actions)

    def stepped(make: Callable[[], Any]) -> int:
        Interrupted.left = 1_000
        with pycollect.SyncDataCollector(
            make, doubling, frames_per_batch=STEPS * ENVS, total_frames=-1
        ) as collector:
            next(collector)
            Interrupted.left = 4
            with pytest.raises(KeyboardInterrupt):
                next(collector)
            next(collector)
            return int(collector.stats()["frames_stepped"])

    assert stepped(Interrupted) == stepped(partial(Other, Interrupted))


@pytest.mark.filterwarnings("ignore:final_observation")
def test_last_observations_may_be_unknown(device: str) -> None:
    arguments = {"final_observation": "unknown"}
    assert_as_arrays(device, lambda: doubling, "SAME_STEP", False, **arguments)
    known = collected(partial(CountingTensors, "SAME_STEP", device=device), doubling)[0]
    unknown = collected(
        partial(CountingTensors, "SAME_STEP", False, device=device), doubling, **arguments
    )[0]
    for batch, other in zip(unknown, known, strict=True):
        valid = batch["next", "observation_valid"]
        assert (valid == ~batch["next", "done"]).all()
        seen = valid.squeeze(-1)
        assert (batch["next", "observation"][seen] == other["next", "observation"][seen]).all()


class InfosOfNoRow(CountingTensors):
    """Return a list with an info of each episode that ended, as PufferLib's environments do."""

    def step(self, actions: Any) -> Any:
        *values, _ = super().step(actions)
        return *values, [{"score": 1.0}] * int(self._ended.sum())


@pytest.mark.filterwarnings("ignore:final_observation")
def test_infos_may_belong_to_no_row(device: str) -> None:
    unknown = {"final_observation": "unknown"}
    assert_same(
        *(
            collected(partial(kind, "SAME_STEP", False, device), doubling, **unknown)
            for kind in (InfosOfNoRow, CountingTensors)
        )
    )
    with refused(ValueError, "final_observation"):
        collected(partial(InfosOfNoRow, "SAME_STEP", False, device), doubling)


class FinalIfTruncated(CountingTensors):
    """Return last observations of truncated rows, as a form of Gymnasium or a list; or "all"."""

    def __init__(self, form: str, device: str) -> None:
        super().__init__("SAME_STEP", "each" if form == "objects" else True, device)
        self.form = form

    def step(self, actions: Any) -> Any:
        *values, info = super().step(actions)
        cut = values[-1]
        if self.form == "all":
            return *values, {**info, "_final_obs": self._ended}
        if self.form == "mask" and cut.any():
            info["_final_obs"] = cut
        elif self.form == "objects" and info:
            info["final_obs"][(self._ended & ~cut).cpu().numpy()] = None
            del info["_final_obs"]
        elif self.form == "list":
            last = info["final_obs"]
            info = [{"final_obs": last[row]} if cut[row] else {} for row in range(len(last))]
        return *values, info if cut.any() or self.form == "list" else {}


@pytest.mark.filterwarnings("ignore:final_observation")
@pytest.mark.parametrize("form", ["mask", "objects", "list"])
def test_some_last_observations_may_be_unknown(device: str, form: str) -> None:
    make = partial(FinalIfTruncated, form, device)
    known = collected(partial(CountingTensors, device=device), doubling)[0]
    some = collected(make, doubling, final_observation="unknown")[0]
    assert any(batch["next", "truncated"].any() for batch in some)
    for batch, other in zip(some, known, strict=True):
        valid = batch["next", "observation_valid"]
        assert (valid == ~batch["next", "terminated"]).all()
        seen = valid.squeeze(-1)
        assert (batch["next", "observation"][seen] == other["next", "observation"][seen]).all()
        assert (batch["next", "observation"][~seen][:, 1] == 0).all()
    with refused(ValueError, "final_observation"):
        collected(make, doubling)


def test_a_mask_of_all_last_observations_changes_nothing(device: str) -> None:
    batches = [
        collected(make, doubling)
        for make in (
            partial(FinalIfTruncated, "all", device),
            partial(CountingTensors, device=device),
        )
    ]
    assert_same(*batches)


def test_unknown_last_observations_must_be_requested(device: str) -> None:
    with refused(ValueError, "final_observation"):
        collected(partial(CountingTensors, "SAME_STEP", False, device=device), doubling)


def test_unknown_last_observations_need_a_reset_in_the_same_step() -> None:
    for make in (partial(CountingTensors, "NEXT_STEP"), partial(CountingArrays, "DISABLED")):
        with refused(ValueError, "final_observation"):
            collected(make, doubling, final_observation="unknown")
    with refused(ValueError, "final_observation"):
        collected(CountingTensors, doubling, final_observation="none")


def in_processes(kind: Any, make: Callable[[], Any], **arguments: Any) -> list[TensorDictBase]:
    frames = 2 * STEPS * ENVS
    given = {"frames_per_batch": frames, "total_frames": 3 * frames, **arguments}
    with kind([make] * 2, doubling, **given) as collector:
        collector.set_seed(3)
        return [batch.clone() for batch in collector]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arguments", [{}, {"inference": "central"}], ids=case_name)
def test_batches_of_processes_equal_those_of_arrays(mode: str, arguments: dict[str, Any]) -> None:
    kind = pycollect.MultiSyncDataCollector
    ours = in_processes(kind, partial(CountingTensors, mode), **arguments)
    theirs = in_processes(kind, partial(CountingArrays, mode), **arguments)
    for batch, other in zip(ours, theirs, strict=True):
        assert (batch == other).all()


class SlowTensors(CountingTensors):
    """A slow environment, to have its rollouts preempted."""

    def step(self, actions: Any) -> Any:
        time.sleep(0.005)
        return super().step(actions)


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_that_end_early_leave_cells_without_frames(mode: str) -> None:
    with pycollect.MultiSyncDataCollector(
        [partial(CountingTensors, mode), partial(SlowTensors, mode)],
        doubling,
        frames_per_batch=2 * 40 * ENVS,
        total_frames=-1,
        preemptive_threshold=0.5,
    ) as collector:
        lacking = 0
        for _ in range(3):
            batch = next(collector)
            mask = batch["collector", "mask"]
            lacking += int((~mask).sum())
            assert (batch["collector", "traj_ids"][~mask] == -1).all()
            for key in batch.exclude(("collector", "traj_ids")).keys(True, True):
                assert not batch[key][~mask].any(), key
            before, after = batch["observation"][mask], batch["next", "observation"][mask]
            assert (after - before == torch.tensor([0.0, 1.0])).all()
            reward = 100 * after[:, :1] + after[:, 1:] + batch["action"][mask]
            assert (batch["next", "reward"][mask] == reward).all()
        assert lacking
        total = collector.ledger()["total"]
        assert total["issued"] == total["delivered"] + total["lost"] + total["in_flight"]


@pytest.mark.slow  # four actors; an actor's worker differs from a process's only in its start
@pytest.mark.ray
def test_rollouts_of_actors_that_end_early_leave_cells_without_frames() -> None:
    ours, theirs = (
        in_processes(pycollect.RayCollector, make, sync=True)
        for make in (CountingTensors, CountingArrays)
    )
    for batch, other in zip(ours, theirs, strict=True):
        assert (batch == other).all()


class Rebuilding(VectorWrapper):
    """Pass a copy of the options to the environment, as Gymnasium's `NumpyToTorch` does."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.env.reset(seed=seed, options=options and type(options)(**options))


def test_wrappers_may_rebuild_options() -> None:
    def batches(wrap: Callable[[Any], Any]) -> list[TensorDictBase]:
        def make() -> Any:
            return wrap(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, **mode))

        mode = {"autoreset_mode": AutoresetMode.DISABLED}
        with pycollect.SyncDataCollector(
            make, None, frames_per_batch=100, total_frames=200
        ) as collector:
            collector.set_seed(3)
            return [batch.clone() for batch in collector]

    for batch, other in zip(batches(Rebuilding), batches(lambda env: env), strict=True):
        assert (batch == other).all()

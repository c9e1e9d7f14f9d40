"""Every mix of CPU and GPU compared with the CPU; see `gpu_support` for runs without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    STACK,
    Way,
    collecting,
    parity_policy,
)
from echo_envs import echo_fns, wait_until
from envs_for_tests import PixelEnv
from gpu_support import DEVICE, counting_env, counting_envs, needs_device, needs_gpu, tensors_of
from raising import refused
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from pycollect import MultiStep, MultiSyncDataCollector, SyncDataCollector, split_trajectories
from pycollect._core import Layout, Leaf, Placement
from pycollect.data.devices import CudaAccelerator, StreamAccelerator, accelerator, indexed
from pycollect.data.slabs import make_shared_pool
from pycollect.data.upload import DeviceUploader

pytestmark = pytest.mark.cuda

DEVICES = [*dict.fromkeys(("cpu", DEVICE))]
MIXES = [mix for mix in product(DEVICES, repeat=2) if DEVICE in mix]
REMOTE = [
    pytest.param(MULTI_STACK, id=MULTI_STACK.name),
    pytest.param(MULTI_ASYNC[0], id=MULTI_ASYNC[0].name),
    pytest.param(STACK, id=STACK.name, marks=[pytest.mark.ray, needs_gpu]),
    pytest.param(ASYNC[0], id=ASYNC[0].name, marks=[pytest.mark.ray, needs_gpu]),
]


def table_policy() -> TensorDictModule:
    """Return a policy with exact arithmetic in its actions and outputs."""
    return parity_policy()


def mlp_policy() -> TensorDictModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2))
    return TensorDictModule(net, ["observation"], ["values"])


class Recurrent(nn.Module):
    """Count the steps of a trajectory in a state; the action is the state's parity."""

    in_keys = ("observation", "count", "is_init")
    out_keys = ("action", ("next", "count"))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        assert td["is_init"].device == td["count"].device == td["observation"].device
        td.set("action", (td["count"] % 2).long().squeeze(-1))
        return td.set(("next", "count"), td["count"] + 1)


def sampling_policy() -> ProbabilisticTensorDictSequential:
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 2), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


def batches(
    way: Way, policy: Any, count: int = 4, *, seed: int | None = None, **arguments: Any
) -> Iterator[TensorDictBase]:
    if way.remote:
        arguments.setdefault("prefetch", 0)
    with collecting(way, echo_fns, policy, frames=21, **arguments) as collector:
        if seed is not None:
            collector.set_seed(seed)
        for _ in range(count):
            yield collector.next()


def assert_equal(
    ours: TensorDictBase, theirs: TensorDictBase, device: str, exact: bool = True
) -> None:
    keys = set(theirs.keys(True, True))
    assert set(ours.keys(True, True)) == keys
    assert ours.batch_size == theirs.batch_size
    for key in keys:
        value = ours[key]
        assert value.device.type == device, key
        assert value.dtype == theirs[key].dtype, key
        if exact or not value.is_floating_point():
            assert torch.equal(value.cpu(), theirs[key]), key
        else:
            torch.testing.assert_close(value.cpu(), theirs[key])


@pytest.mark.parametrize(("policy_device", "storing_device"), MIXES)
@pytest.mark.parametrize("inference", [table_policy, Recurrent, mlp_policy])
def test_every_mix_of_devices_in_process(
    policy_device: str, storing_device: str, inference: Callable[[], Any]
) -> None:
    arguments: dict[str, Any] = {}
    if inference is Recurrent:
        arguments["policy_state"] = {"count": (1,)}
    make = inference
    if inference is mlp_policy:

        def make() -> Any:
            return nn_sequence(mlp_policy(), above(9.0))

    expected = batches(IN_PROCESS, make(), **arguments)
    came = batches(
        IN_PROCESS, make(), policy_device=policy_device, storing_device=storing_device, **arguments
    )
    for ours, theirs in zip(came, expected, strict=True):
        assert ours.device == indexed(torch.device(storing_device))
        assert_equal(ours, theirs, storing_device, exact=inference is not mlp_policy)


def above(limit: float) -> TensorDictModule:
    return TensorDictModule(lambda x: (x[..., 0] > limit).long(), ["values"], ["action"])


def nn_sequence(*modules: Any) -> Any:
    from tensordict.nn import TensorDictSequential

    return TensorDictSequential(*modules)


@pytest.mark.parametrize("way", REMOTE)
@pytest.mark.parametrize("policy_device", DEVICES)
def test_devices_of_workers(way: Way, policy_device: str) -> None:
    if way.name.startswith("ray") and policy_device == "cuda":
        pytest.skip("the session's Ray was started without GPUs")
    came = list(batches(way, table_policy(), policy_device=policy_device, storing_device=DEVICE))
    if not way.sync:
        assert all(td["observation"].device.type == DEVICE for td in came)
        return
    for ours, theirs in zip(came, batches(way, table_policy()), strict=True):
        assert_equal(ours, theirs, DEVICE)


@needs_gpu
@pytest.mark.parametrize("way", [IN_PROCESS, MULTI_STACK], ids=lambda way: way.name)
@pytest.mark.parametrize("kind", [CudaAccelerator, StreamAccelerator])
def test_the_cores_copies_equal_torchs(
    way: Way, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = kind(torch.device("cuda", 0))
    monkeypatch.setattr("pycollect.data.upload.accelerator", lambda _: own)
    came = batches(way, table_policy(), 12, storing_device="cuda")
    for ours, theirs in zip(came, batches(way, table_policy(), 12), strict=True):
        assert_equal(ours, theirs, "cuda")


@needs_gpu
def test_the_core_uploads_shared_memory_without_a_host_copy(
    recwarn: pytest.WarningsRecorder,
) -> None:
    device = accelerator(torch.device("cuda", 0))
    assert isinstance(device, CudaAccelerator)
    pool = make_shared_pool(Placement(Layout([Leaf(("a",), "uint8", (64,))]), 1, 1, 64), 1, 1)
    assert device.pin(pool)
    slab = pool.acquire()
    assert torch.from_numpy(slab.array()).is_pinned()
    for _ in batches(MULTI_STACK, table_policy(), 2, storing_device="cuda"):
        pass
    assert not [own for own in recwarn if "pinned" in str(own.message)]


@pytest.mark.parametrize("make", [counting_env, counting_envs])
def test_all_tensors_of_an_environment_are_on_its_device(make: Callable[[str], Any]) -> None:
    pytest.importorskip("torchrl")
    env = make("meta")
    specs = [*env.input_spec.values(True, True), *env.output_spec.values(True, True)]
    assert {own.device.type for own in (env, *tensors_of(env), *specs)} == {"meta"}


def env_cases() -> Iterator[Any]:
    """Yield every argument on every mix of devices; mark most mixes with an argument as slow."""
    usual = (DEVICE, None), ("cpu", DEVICE)
    for arguments in (
        {},
        {"max_frames_per_traj": 2, "set_truncated": True},
        {"compact_obs": True},
        {"split_trajs": True},
        {"trajs_per_batch": 3, "max_frames_per_traj": 4},
        {"observation_dtype": torch.bfloat16, "observation_scale": 0.5},
    ):
        for mix in product(DEVICES, [None, *DEVICES]):
            marks = [] if mix in usual or not arguments else [pytest.mark.slow]
            yield pytest.param(arguments, *mix, id=f"{arguments} {mix}", marks=marks)


@pytest.mark.parametrize(("arguments", "policy_device", "storing_device"), env_cases())
def test_envs_on_the_gpu(
    arguments: dict[str, Any], policy_device: str, storing_device: str | None
) -> None:
    pytest.importorskip("torchrl")

    def collected(device: str, **devices: Any) -> list[Any]:
        policy = TensorDictModule(lambda seen: (seen % 2).bool(), ["observation"], ["action"])
        env = counting_envs(device)
        everything = {"frames_per_batch": 21, **arguments, **devices}
        with SyncDataCollector(env, policy, **everything) as collector:
            return [collector.next() for _ in range(4)]

    devices = {"policy_device": policy_device, "storing_device": storing_device}
    for ours, theirs in zip(collected(DEVICE, **devices), collected("cpu"), strict=True):
        assert_equal(ours, theirs, storing_device or DEVICE)


@pytest.mark.parametrize("way", [MULTI_STACK, MULTI_ASYNC[0]], ids=lambda way: way.name)
@pytest.mark.parametrize("storing_device", DEVICES)
def test_envs_on_the_gpu_in_processes(way: Way, storing_device: str) -> None:
    pytest.importorskip("torchrl")

    def collected(device: str, **devices: Any) -> list[Any]:
        make = partial(counting_env, device)
        policy = TensorDictModule(lambda seen: (seen % 2).bool(), ["observation"], ["action"])
        with collecting(way, lambda _: make, policy, frames=24, **devices) as collector:
            return [collector.next() for _ in range(3)]

    came = collected(DEVICE, policy_device=DEVICE, storing_device=storing_device)
    if not way.sync:
        assert all(td["observation"].device.type == storing_device for td in came)
        return
    for ours, theirs in zip(came, collected("cpu"), strict=True):
        assert_equal(ours, theirs, storing_device)


@pytest.mark.parametrize("policy_device", DEVICES)
@pytest.mark.parametrize("size", [(), (3,), (2, 3)])
def test_states_of_a_policy_whose_env_is_on_the_gpu(
    size: tuple[int, ...], policy_device: str
) -> None:
    pytest.importorskip("torchrl")

    class Parity(Recurrent):
        def forward(self, td: TensorDictBase) -> TensorDictBase:
            super().forward(td)
            return td.set("action", td["action"].unsqueeze(-1).bool())

    def collected(device: str, **devices: Any) -> list[Any]:
        env = counting_env(device, size)
        arguments = {"policy_state": {"count": (1,)}, "frames_per_batch": 24, **devices}
        with SyncDataCollector(env, Parity(), **arguments) as collector:
            return [collector.next() for _ in range(3)]

    came = collected(DEVICE, policy_device=policy_device)
    for ours, theirs in zip(came, collected("cpu"), strict=True):
        assert_equal(ours, theirs, DEVICE)


def test_later_batches_do_not_change_earlier_ones() -> None:
    came = list(batches(IN_PROCESS, table_policy(), 20, storing_device=DEVICE))
    for ours, theirs in zip(came, batches(IN_PROCESS, table_policy(), 20), strict=True):
        assert_equal(ours, theirs, DEVICE)


@needs_gpu
def test_a_busy_stream_gets_the_right_batches() -> None:
    """The learner's stream lags by whole batches; copies must not overtake its reads."""
    matrix = torch.randn(2048, 2048, device="cuda")
    sums = []
    for td in batches(IN_PROCESS, table_policy(), 12, storing_device="cuda"):
        for _ in range(20):
            matrix = matrix @ matrix * 1e-3
        sums.append(td["observation"].sum())
        del td
    expected = [td["observation"].sum() for td in batches(IN_PROCESS, table_policy(), 12)]
    assert torch.stack(sums).cpu().tolist() == torch.stack(expected).tolist()


def test_casts_equal_the_cpus() -> None:
    arguments = {"observation_dtype": torch.bfloat16, "observation_scale": 1 / 255}
    came = batches(IN_PROCESS, table_policy(), storing_device=DEVICE, **arguments)
    for ours, theirs in zip(came, batches(IN_PROCESS, table_policy(), **arguments), strict=True):
        assert_equal(ours, theirs, DEVICE)


def test_casts_of_bytes_in_one_pass_equal_the_cpus() -> None:
    def collected(**more: Any) -> list[TensorDictBase]:
        arguments = {"observation_dtype": torch.bfloat16, "observation_scale": 1 / 255, **more}
        with SyncDataCollector(
            PixelEnv, None, frames_per_batch=20, total_frames=60, **arguments
        ) as collector:
            collector.set_seed(0)
            return list(collector)

    for ours, theirs in zip(collected(storing_device=DEVICE), collected(), strict=True):
        assert_equal(ours, theirs, DEVICE)


@pytest.mark.parametrize(
    "arguments",
    [
        {"split_trajs": True},
        {"trajs_per_batch": 3, "max_frames_per_traj": 5},
        {"trajs_per_batch": 3, "max_frames_per_traj": 5, "traj_format": "cat"},
        {"postproc": MultiStep(0.9, 3)},
        {"split_trajs": True, "postproc": MultiStep(0.5, 2)},
    ],
    ids=str,
)
def test_trajectories_on_the_device(arguments: dict[str, Any]) -> None:
    came = batches(IN_PROCESS, table_policy(), storing_device=DEVICE, **arguments)
    for ours, theirs in zip(came, batches(IN_PROCESS, table_policy(), **arguments), strict=True):
        assert_equal(ours, theirs, DEVICE, exact="postproc" not in arguments)


def test_split_of_a_batch_on_the_device() -> None:
    (td,) = batches(IN_PROCESS, table_policy(), 1)
    assert_equal(split_trajectories(td.to(DEVICE)), split_trajectories(td), DEVICE)
    ids = td["collector", "traj_ids"]
    td["collector", "traj_ids"] = ids.unsqueeze(-1)  # as done flags have it
    assert_equal(split_trajectories(td.to(DEVICE)), split_trajectories(td), DEVICE)


def test_a_policy_on_the_gpu_runs_there() -> None:
    """The policy runs on the device of its parameters, with live weights."""
    policy = TensorDictModule(nn.Linear(3, 2, device=DEVICE), ["observation"], ["values"])
    pick = TensorDictModule(lambda values: values.argmax(-1), ["values"], ["action"])
    with SyncDataCollector(
        echo_fns(0), nn_sequence(policy, pick), frames_per_batch=21
    ) as collector:
        before = collector.next()
        with torch.no_grad():
            policy.module.weight.zero_()
            policy.module.bias.fill_(3.0)
        after = collector.next()
    assert before["values"].device.type == "cpu"
    assert after["values"].unique().tolist() == [3.0]


@needs_device
def test_a_copy_of_the_policy_gets_weights_on_an_update() -> None:
    policy = TensorDictModule(nn.Linear(3, 2), ["observation"], ["values"])
    pick = TensorDictModule(lambda values: values.argmax(-1), ["values"], ["action"])
    with SyncDataCollector(
        echo_fns(0), nn_sequence(policy, pick), frames_per_batch=21, policy_device=DEVICE
    ) as collector:
        collector.next()
        with torch.no_grad():
            policy.module.weight.zero_()
            policy.module.bias.fill_(3.0)
        assert collector.next()["values"].unique().numel() > 1
        collector.update_policy_weights_()
        assert collector.next()["values"].unique().tolist() == [3.0]


def test_seeds_apply_to_the_generator_of_the_device() -> None:
    policy = sampling_policy()  # seeds itself
    runs = []
    for noise in range(2):
        torch.manual_seed(noise)  # also seeds the GPU's generator
        stream = batches(IN_PROCESS, policy, 3, seed=5, policy_device=DEVICE)
        runs.append([td["action"] for td in stream])
    for ours, theirs in zip(*runs, strict=True):
        assert torch.equal(ours, theirs)


def test_the_callers_generator_is_not_used() -> None:
    policy = sampling_policy()  # seeds itself
    torch.manual_seed(3)
    expected = torch.randn(4, device=DEVICE)
    torch.manual_seed(3)
    for _ in batches(IN_PROCESS, policy, 2, seed=5, policy_device=DEVICE):
        pass
    assert torch.equal(torch.randn(4, device=DEVICE), expected)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"cudagraph_policy": True}, marks=needs_gpu),
        pytest.param({"cudagraph_policy": {"warmup": 3}}, marks=needs_gpu),
        # Inductor needs tens of seconds, and Triton needs a C compiler and Python's headers.
        pytest.param({"compile_policy": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_captured_and_compiled_policies(arguments: dict[str, Any]) -> None:
    def make() -> Any:
        return nn_sequence(mlp_policy(), above(9.0))

    came = batches(IN_PROCESS, make(), policy_device=DEVICE, **arguments)
    for ours, theirs in zip(came, batches(IN_PROCESS, make()), strict=True):
        assert_equal(ours, theirs, "cpu", exact=False)


@needs_gpu
def test_a_captured_policy_follows_its_mode() -> None:
    policy = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).cuda()
    with SyncDataCollector(
        lambda: gymnasium.make("Pendulum-v1"),
        policy,
        frames_per_batch=8,
        policy_device="cuda",
        cudagraph_policy=True,
    ) as collector:
        collector.next()
        policy.eval()
        batch = collector.next()
        with torch.no_grad():
            expected = policy(batch["observation"].cuda()).cpu()
        torch.testing.assert_close(batch["action"], expected, atol=1e-3, rtol=1e-3)


@needs_gpu
def test_graphs_of_a_policy_on_the_cpu_are_refused() -> None:
    with refused(ValueError, "cudagraph_policy"):
        list(batches(IN_PROCESS, table_policy(), cudagraph_policy=True))


@pytest.fixture(scope="module")
def name_of_cudas() -> Iterator[Path]:
    """Create a file like CUDA's in /dev/shm; it exists until the module ends."""
    path = Path(f"/dev/shm/cuda.shm.0.{os.getpid():x}.1")
    if not path.parent.is_dir():
        pytest.skip("needs /dev/shm")
    path.touch()
    yield path
    path.unlink()


def test_shared_cuda_memory_may_remain(request: pytest.FixtureRequest) -> None:
    """Otherwise the leak check would fail the first test that uses CUDA in this process."""
    assert request.getfixturevalue("name_of_cudas").exists()


@needs_gpu
def test_pinned_memory_is_pinned() -> None:
    memory = DeviceUploader(accelerator(torch.device("cuda", 0))).allocate(1 << 20)
    assert torch.from_numpy(memory).is_pinned()


def pendulum() -> Any:
    return gymnasium.make("Pendulum-v1")


class Buffer(list[Any]):
    """Keep whole batches."""

    def extend(self, td: Any) -> None:
        self.append(td)


@needs_gpu
@pytest.mark.parametrize("central", [False, True])
def test_a_policy_does_not_wait_for_a_busy_learner(central: bool) -> None:
    """The policy waits for a weight update, but not for seconds of queued learner work."""
    buffer = Buffer()
    policy = nn.Linear(3, 1).cuda()
    arguments: dict[str, Any] = {"frames_per_batch": 16, "replay_buffer": buffer}
    collector: Any = (
        MultiSyncDataCollector(
            [pendulum] * 2, policy, inference="central", cudagraph_policy=True, **arguments
        )
        if central
        else SyncDataCollector(pendulum, policy, **arguments)
    )
    with collector:
        collector.start()
        wait_until(lambda: len(buffer) > 4)  # captured by now
        torch.cuda._sleep(4 << 30)
        slept = torch.cuda.Event()
        slept.record()
        seen = len(buffer)
        wait_until(lambda: len(buffer) > seen + 3)
        assert not slept.query()
        collector.update_policy_weights_()
        after = len(buffer)
        # One batch may be complete already, and another one in flight.
        wait_until(lambda: len(buffer) > after + 2)
        assert slept.query()


@needs_gpu
@pytest.mark.parametrize("graphed", [False, True])
def test_a_batch_has_the_weights_of_the_step_before(graphed: bool) -> None:
    """This holds even if the learner's step is still queued when the batch is requested."""
    policy = nn.Linear(3, 1).cuda()
    with SyncDataCollector(
        pendulum, policy, frames_per_batch=8, cudagraph_policy=graphed
    ) as collector:
        for _ in range(4):
            torch.cuda._sleep(1 << 27)
            with torch.no_grad():
                policy.weight.add_(0.1)
            batch = collector.next()
            with torch.no_grad():
                expected = policy(batch["observation"].cuda()).cpu()
            torch.testing.assert_close(batch["action"], expected, atol=1e-3, rtol=1e-3)

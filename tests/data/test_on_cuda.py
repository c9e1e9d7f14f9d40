"""Python code around CUDA, tested without a driver: loading the kernel, and CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from collect_support import parity_policy
from echo_envs import echo_fns
from fake_device import Elsewhere, FakeDevice, place_policies_on
from raising import refused
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical

from pycollect import MultiStep, MultiSyncDataCollector, SyncDataCollector
from pycollect._core import CudaError
from pycollect.data import gather_cuda as on_cuda
from pycollect.data.devices import CPU
from pycollect.policy.calling import CallOptions, CapturedCall, GraphPool
from pycollect.policy.device import DeviceTransfer
from pycollect.policy.program.steps import CallStep, HeadStep, Program


class Leaf:
    """A stand-in for a tensor that only has a device."""

    device = torch.device("cuda", 0)

    def detach(self) -> Leaf:
        return self


def test_a_driver_that_refuses_the_kernel_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(device: int) -> Any:
        raise CudaError("cuModuleLoadDataEx: CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222): too new")

    monkeypatch.setattr(on_cuda, "DeviceGather", refused)
    monkeypatch.setattr(on_cuda, "is_raw", lambda leaf: True)
    monkeypatch.setattr("pycollect.cuda.is_torchs", lambda: True)
    on_cuda._gather.cache_clear()
    leaves: Any = {("reward",): Leaf()}
    try:
        with pytest.warns(UserWarning, match="cuModuleLoadDataEx") as warned:
            found = [on_cuda.on_one_device(leaves) for _ in range(2)]
        assert found == [{}, {}]
        assert len(warned) == 1
        monkeypatch.setattr(on_cuda, "DeviceGather", lambda device: object())
        on_cuda._gather.cache_clear()
        assert on_cuda.on_one_device(leaves) == leaves
    finally:
        on_cuda._gather.cache_clear()


@pytest.mark.parametrize("arguments", [{"split_trajs": True}, {"postproc": MultiStep(0.9, 3)}, {}])
def test_the_kernel_is_loaded_before_the_first_batch(
    arguments: dict[str, Any], fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading makes the driver compile the kernel, which takes a few tenths of a second."""
    made: list[int] = []
    monkeypatch.setattr("pycollect.cuda.is_torchs", lambda: True)
    monkeypatch.setattr(on_cuda, "_gather", made.append)
    monkeypatch.setattr(on_cuda, "with_index", lambda device: torch.device("cuda", 3))
    collector = SyncDataCollector(
        echo_fns(0), parity_policy(), frames_per_batch=9, storing_device="cuda", **arguments
    )
    collector.shutdown()
    assert made == ([3] if arguments else [])


class Graph:
    """A CUDA graph on the host: a replay repeats the calls recorded during capture."""

    captured: Graph
    pools: list[object]  # one per capture
    calls: list[Callable[[], None]]

    def __init__(self) -> None:
        self.calls = []
        self.own = object()

    def pool(self) -> object:
        return self.own

    def replay(self) -> None:
        for call in self.calls:
            call()


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept any arguments, because all streams are alike."""

    def wait_stream(self, other: Stream) -> None:
        """Do nothing: calls on the host are already in order."""


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torch's graphs by graphs on the host, and return the mode of each capture."""
    seen: list[str] = []

    @contextlib.contextmanager
    def capture(
        graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        seen.append(capture_error_mode)
        Graph.captured = graph
        Graph.pools.append(graph.own if pool is None else pool)
        yield
        graph.own = Graph.pools[-1]

    Graph.pools = []

    for name, value in {
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": Stream,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return seen


def double(value: torch.Tensor, factor: int = 2) -> tuple[torch.Tensor, None]:
    """Return twice the value, written to the same memory each time, as a graph does."""
    result = torch.empty_like(value)

    def work() -> None:
        torch.mul(value, factor, out=result)

    work()
    if hasattr(Graph, "captured"):
        Graph.captured.calls.append(work)
    return result, None


def test_a_capture_is_not_ended_by_other_threads(modes: list[str]) -> None:
    call = CapturedCall(double, warmup=1)
    for step in range(3):
        result, nothing = call(torch.tensor([1.0, step]))
        assert result.tolist() == [2, 2 * step]
        assert nothing is None
    assert modes == ["thread_local"]


def test_graphs_share_memory_while_any_of_them_exists(modes: list[str]) -> None:
    """A pool is freed with its last graph; torch fails if it gets the same handle again."""
    shared = GraphPool()
    for _ in range(2):
        calls = [CapturedCall(double, 1, shared) for _ in range(3)]
        for call in calls:
            for _ in range(2):
                call(torch.ones(1))
        calls.clear()
        del call
        Graph.captured = Graph()
        gc.collect()
    first, second = Graph.pools[:3], Graph.pools[3:]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] is not second[0]
    for _ in range(2):  # without a shared pool, each has its own
        call = CapturedCall(double, 1)
        for _ in range(2):
            call(torch.ones(1))
    assert Graph.pools[-1] is not Graph.pools[-2]


def test_all_graphs_of_central_inference_share_memory(
    modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of rows, and each group of environments, has its own graph."""
    pools: list[Any] = []

    def noted(self: DeviceTransfer, act: Any, pool: Any = None, **arguments: Any) -> Any:
        pools.append(pool)
        return self.wrap(act)

    monkeypatch.setattr(Elsewhere, "capture", noted)
    monkeypatch.setattr(CallOptions, "for_device", lambda self, device: self)
    place_policies_on(OnTheHost(), monkeypatch)
    with MultiSyncDataCollector(
        [["CartPole-v1"] * 2] * 2,
        TensorDictModule(Leaning(scores=False), ["observation"], ["action"]),
        frames_per_batch=40,
        cudagraph_policy=True,
        inference="central",
        env_groups=2,
    ) as collector:
        collector.next()
    assert len(pools) > 1
    assert len(set(pools)) == 1
    assert isinstance(pools[0], GraphPool)


def test_an_argument_that_is_not_a_tensor_is_captured_by_value(modes: list[str]) -> None:
    call = CapturedCall(double, warmup=1)
    for step in range(3):
        assert call(torch.tensor([step]), factor=3)[0].tolist() == [3 * step]


def test_an_input_of_another_shape_is_refused(modes: list[str]) -> None:
    call = CapturedCall(double, warmup=1)
    for _ in range(2):
        call(torch.ones(2))
    with refused(ValueError, "inputs"):
        call(torch.ones(1))


class OnTheHost(FakeDevice):
    """A fake device that runs torch's copies at once, and logs waits."""

    def __init__(self) -> None:
        super().__init__(lazy=False)


def test_a_step_with_both_copies_is_one_graph(
    modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a real graph, the fake graph repeats the recorded copies and work."""
    plain = torch.Tensor.copy_

    def copied(own: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking and hasattr(Graph, "captured"):
            Graph.captured.calls.append(lambda: plain(own, source))
        return plain(own, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.delattr(Graph, "captured", raising=False)
    device = OnTheHost()
    transfer = Elsewhere(CPU, CPU)
    transfer.use(device)
    source = torch.zeros(2)
    (mirror,) = transfer.mirrors({("observation",): source}).values()
    assert transfer.can_capture
    act = transfer.capture(lambda: (double(mirror)[0],), warmup=2)
    for step in range(5):
        source.fill_(step)
        (out,) = act()
        assert out.tolist() == [2 * step] * 2
        assert device.log.count("host waits") == step + 1  # once per step
    assert modes == ["thread_local"]
    # Copy in, compute, copy out.
    assert len(Graph.captured.calls) == 3


def test_a_step_with_several_inputs_and_outputs_is_one_graph(
    modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {("observation",): torch.zeros(2), ("count",): torch.zeros(1, dtype=torch.int64)}
    staged = {own.data_ptr() for own in sources.values()}
    plain = torch.Tensor.copy_

    def copied(own: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Staging happens before the graph begins."""
        if hasattr(Graph, "captured") and source.data_ptr() not in staged:
            Graph.captured.calls.append(lambda: plain(own, source))
        return plain(own, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.delattr(Graph, "captured", raising=False)
    device = OnTheHost()
    transfer = Elsewhere(CPU, CPU)
    transfer.use(device)
    mirrors = transfer.mirrors(sources)
    kept = torch.zeros(1, dtype=torch.int64)
    transfer.store_outputs({1: kept})
    act = transfer.capture(lambda: tuple(double(own)[0] for own in mirrors.values()), warmup=1)
    for step in range(4):
        for source in sources.values():
            source.fill_(step)
        seen, count = act()
        assert (seen.tolist(), count.tolist()) == ([2 * step] * 2, [2 * step])
        assert torch.equal(kept, count)
    assert device.log.count("host waits") == 4
    # Copy in, compute, join, copy out; store the kept output.
    assert len(Graph.captured.calls) == 1 + 2 + 2 + 1 + 1


class Leaning(nn.Module):
    """A policy that pushes toward the side of the falling pole, as scores or as the action."""

    def __init__(self, *, scores: bool) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        falls = observation[..., 2]
        return torch.stack([-falls, falls], -1) if self.scores else (falls > 0).long()


@pytest.mark.parametrize("draws", [False, True])
def test_a_collectors_step_is_one_graph_unless_something_is_drawn(
    draws: bool, modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole step is only recorded, and runs as it is; a single call is captured."""
    whole: list[dict[str, Any]] = []

    def noted(self: DeviceTransfer, act: Any, **arguments: Any) -> Any:
        whole.append(arguments)
        return self.wrap(act)

    monkeypatch.setattr(Elsewhere, "capture", noted)
    monkeypatch.setattr(CallOptions, "for_device", lambda self, device: self)
    place_policies_on(OnTheHost(), monkeypatch)
    policy: Any = TensorDictModule(
        Leaning(scores=draws), ["observation"], ["logits" if draws else "action"]
    )
    if draws:
        head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        policy = ProbabilisticTensorDictSequential(policy, head)
    with SyncDataCollector(
        "CartPole-v1", policy, frames_per_batch=40, cudagraph_policy={"warmup": 3}
    ) as collector:
        td = collector.next()
    assert whole == ([] if draws else [{"warmup": 3, "pool": None}])
    assert len(modes) == draws
    if not draws:
        assert torch.equal(td["action"].bool(), td["observation"][..., 2] > 0)


class Scaled(Leaning):
    """The same policy with a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__(scores=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))

    def lean(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation * self.scale + self.shift)


@pytest.mark.parametrize("name", ["scale", "shift"])
def test_a_step_is_captured_again_if_a_tensor_was_replaced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[Any] = []

    def noted(self: DeviceTransfer, act: Any, **_: Any) -> Any:
        captures.append(act)
        return self.wrap(act)

    monkeypatch.setattr(Elsewhere, "capture", noted)
    monkeypatch.setattr(CallOptions, "for_device", lambda self, device: self)
    place_policies_on(OnTheHost(), monkeypatch)
    policy = TensorDictModule(Scaled(), ["observation"], ["action"], method="lean")
    tensor = getattr(policy.module, name)
    with SyncDataCollector(
        "CartPole-v1", policy, frames_per_batch=10, cudagraph_policy=True
    ) as collector:
        collector.next()
        tensor.data.add_(0.5)
        collector.next()
        assert len(captures) == 1
        tensor.data = tensor.data + 0.5
        collector.next()
    assert len(captures) == 2


def test_a_graph_keeps_a_state_after_copying_it_to_the_host(
    modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state copied to the host is the tensor that the graph writes."""
    plain = torch.Tensor.copy_

    def copied(own: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if hasattr(Graph, "captured") and source.data_ptr() != observed.data_ptr():
            Graph.captured.calls.append(lambda: plain(own, source))
            if own is count:  # a capture itself does nothing
                return own
        return plain(own, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.delattr(Graph, "captured", raising=False)
    device = OnTheHost()
    transfer = Elsewhere(CPU, CPU)
    transfer.use(device)
    observed, count = torch.zeros(2), torch.zeros(1)
    (mirror,) = transfer.mirrors({("observation",): observed}).values()
    transfer.store_outputs({2: count})
    act = transfer.capture(lambda: (double(mirror)[0], count, double(mirror[:1])[0]), warmup=1)
    before = 0.0
    for step in range(1, 5):
        observed.fill_(step)
        seen, read, following = act()
        assert (seen.tolist(), following.tolist()) == ([2 * step] * 2, [2 * step])
        assert read.tolist() == [before]
        before = 2.0 * step
        assert count.tolist() == [before]
    assert device.log.count("host waits") == 4


def test_random_draws_are_not_captured() -> None:
    transfer = DeviceTransfer(CPU, CPU)
    assert not transfer.can_capture  # no transfer
    call = CallStep(torch.relu, (("observation",),), (("action",),))
    head: Any = object()
    draw = HeadStep(head, (("logits",),), (("action",),), None, InteractionType.RANDOM)
    graphed = CallOptions(graphed={})
    assert graphed.can_capture_step(Program((call,)))
    assert not graphed.can_capture_step(Program((call, draw)))
    assert not CallOptions().can_capture_step(Program((call,)))

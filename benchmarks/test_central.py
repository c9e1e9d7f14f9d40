"""Central inference compared with a policy in each worker, on one shared device.

A lock stands for a GPU: each call of the policy holds it for two milliseconds, for any batch size.
The first limit is the policy alone, called for all environments. The second limit is processes that
step the environments and send requests through the same slots, without recording. With groups,
environments also take time, and the limit is the slower of policy and environments. With one slow
environment in each process, other libraries step them in processes, too: the policy is called for
all of them at once, so they wait for the slowest one.
"""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from benchmarks.race import Side
from pycollect.bench.sides import FreeFrames, count, for_torchrl, nature_policy, ours, torchrls

CALL_SECONDS = 0.002
ENV_SECONDS = 0.001
SLOW_CALL_SECONDS = 0.005
SLOW_ENV_SECONDS = 0.02
BARE = "two processes and a futex"
ENVS = 4  # in each worker
STEPS = 50
HIDDEN = 256
FRAME_BYTES = 2 * 3 * 4
"""Bytes of a frame: three numbers before and after the step."""
PROCESS = "pycollect, async, by a process"
SAMPLE_FACTORY = "PYCOLLECT_SAMPLE_FACTORY"
"""Variable with the path of a Python that has Sample Factory 2.1, which needs Gymnasium < 1.0."""
PEER = "TorchRL"
WORKERS = "pycollect, a policy in each worker"
ALONE = "the policy alone, for all environments"
UNRECORDED = "processes that step and request actions, without recording"
STEPPED = "the environments alone"


class OnDevice(nn.Module):
    """A policy of zeros, whose calls lock the device for a while."""

    def __init__(self, lock: str, seconds: float) -> None:
        """Store the path of the device's lock file, and the duration of a call."""
        super().__init__()
        self.lock, self.seconds = lock, seconds
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Lock the device for the duration of a call."""
        with open(self.lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(self.seconds)
        return (self.bias + observation[..., :1]).detach() * 0


def on_device(lock: str, seconds: float = CALL_SECONDS) -> TensorDictModule:
    """Return the policy that locks a device."""
    return TensorDictModule(OnDevice(lock, seconds), ["observation"], ["action"])


def nature(lock: str) -> TensorDictModule:
    """Return the policy for pixels, which needs no lock."""
    torch.manual_seed(0)
    return nature_policy()


class LstmStep(nn.Module):
    """One step of an LSTM of 256 from its first state, and a head."""

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__()
        self.cell, self.head = nn.LSTM(3, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return an action for each environment."""
        return self.head(self.cell(observation[None])[0][0])


def lstm(lock: str) -> TensorDictModuleBase:
    """Return TorchRL's LSTM of 256 with a head."""
    from torchrl.modules import LSTMModule

    torch.manual_seed(0)
    return TensorDictSequential(
        LSTMModule(input_size=3, hidden_size=HIDDEN, in_key="observation", out_key="features"),
        TensorDictModule(nn.Linear(HIDDEN, 1), ["features"], ["action"]),
    )


class Still(FreeFrames):
    """Three numbers that do not change: stepping costs nothing."""

    def __init__(self) -> None:
        """Create the only frame."""
        super().__init__()
        self.observation_space = Box(-1.0, 1.0, (3,), np.float32)
        self.frames = [np.zeros(3, np.float32)] * 4


class Slow(Still):
    """Each step waits for a millisecond."""

    seconds = ENV_SECONDS

    def step(self, action: Any) -> Any:
        """Wait."""
        time.sleep(self.seconds)
        return super().step(action)


class Slowest(Slow):
    """Each step waits for twenty milliseconds."""

    seconds = SLOW_ENV_SECONDS


SLOW = {"equal": [Slow] * 8, "one of 20 ms": [Slow] * 7 + [Slowest]}
"""One environment for each process."""


def central(
    env: Any, policy: Any, lock: str, workers: int, inference: str | None = "central", **more: Any
) -> Iterator[int]:
    """Collect with MultiSyncDataCollector."""
    return ours(
        "MultiSyncDataCollector",
        [[env] * ENVS] * workers,
        partial(policy, lock),
        read=count,
        frames_per_batch=workers * ENVS * STEPS,
        inference=inference,
        **more,
    )


def by_a_process(env: Any, policy: Any, lock: str, workers: int, **more: Any) -> Iterator[int]:
    """Collect with MultiaSyncDataCollector; a separate process calls the policy."""
    return ours(
        "MultiaSyncDataCollector",
        [[env] * ENVS] * workers,
        partial(policy, lock),
        read=count,
        frames_per_batch=ENVS * STEPS,
        inference="central",
        **more,
    )


def torchrl(env: Any, policy: Any, lock: str, workers: int) -> Iterator[int]:
    """Collect with TorchRL's AsyncBatchedCollector: environments in processes, one server."""
    module = policy(lock)
    return torchrls(
        "AsyncBatchedCollector",
        [partial(primed, for_torchrl(env), module)] * (workers * ENVS),
        lambda: module,
        read=count,
        frames_per_batch=workers * ENVS * STEPS,
        env_backend="multiprocessing",
        policy_backend="threading",
        envs_per_worker=ENVS,
    )


def slow_central(case: str, lock: str, sync: bool) -> Iterator[int]:
    """Collect from one slow environment in each process, with a policy of 5 ms."""
    makes = SLOW[case]
    return ours(
        "MultiSyncDataCollector" if sync else "MultiaSyncDataCollector",
        makes,
        partial(on_device, lock, SLOW_CALL_SECONDS),
        read=count,
        frames_per_batch=STEPS * (len(makes) if sync else 1),
        inference="central",
    )


def slow_loop(case: str, lock: str, subproc: bool) -> Iterator[int]:
    """Step the same environments in another library's processes, with one call for all."""
    if subproc:
        from stable_baselines3.common.vec_env import SubprocVecEnv as Processes
    else:
        from gymnasium.vector import AsyncVectorEnv as Processes
    env, policy = Processes(SLOW[case]), OnDevice(lock, SLOW_CALL_SECONDS)
    current = env.reset() if subproc else env.reset()[0]
    kept = np.empty((STEPS, *current.shape), np.float32)
    try:
        with torch.no_grad():
            while True:
                for t in range(STEPS):
                    kept[t] = current
                    current = env.step(policy(torch.from_numpy(current)).numpy())[0]
                yield STEPS * len(current)
    finally:
        env.close()


def sample_factory(
    case: str,
    lock: str,
    workers: int,
    envs: int = ENVS,
    call: float = CALL_SECONDS,
    waits: Sequence[float] = (0.0,),
) -> Iterator[int]:
    """Sample with Sample Factory, in the interpreter that an environment variable names.

    It would continue between turns, so it is stopped while other sides run.

    Args:
        call: Seconds of a call of the policy.
        waits: Seconds of a step, for the environments of each process in turn.
    """
    script = Path(__file__).with_name("peer_sample_factory.py")
    numbers = [str(own) for own in (workers, envs, STEPS, call, *waits)]
    command = [os.environ[SAMPLE_FACTORY], script, case, lock, *numbers]
    running = subprocess.Popen(
        command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, start_new_session=True
    )
    assert running.stdin is not None
    assert running.stdout is not None
    try:
        while True:
            running.stdin.write("\n")
            running.stdin.flush()
            told = next(line for line in running.stdout if line.startswith("frames "))
            os.killpg(running.pid, signal.SIGSTOP)
            yield int(told.split()[1])
            os.killpg(running.pid, signal.SIGCONT)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def primed(make: Callable[[], Any], module: Any) -> Any:
    """Return TorchRL's environment with the transforms that a recurrent policy needs."""
    if "is_init" not in module.in_keys:
        return make()
    from torchrl.envs import Compose, InitTracker, TransformedEnv

    return TransformedEnv(make(), Compose(InitTracker(), module[0].make_tensordict_primer()))


def for_all(env: Any, policy: Any, lock: str, workers: int) -> Callable[[], Any]:
    """Return a function that calls the policy for all environments at once."""
    module = LstmStep() if policy is lstm else policy(lock).module
    observation = torch.from_numpy(env().reset()[0])
    return partial(module, observation.expand(workers * ENVS, *observation.shape))


def alone(env: Any, policy: Any, lock: str, workers: int) -> Iterator[int]:
    """Call only the policy, for all environments at once."""
    call = for_all(env, policy, lock, workers)
    with torch.no_grad():
        while True:
            for _ in range(STEPS):
                call()
            yield workers * ENVS * STEPS


def unrecorded(env: Any, policy: Any, lock: str, workers: int) -> Iterator[int]:
    """Call the policy for processes that step the environments and record nothing."""
    from pycollect._core import Bell, ServerSlots

    bell, slots, call = Bell(), ServerSlots(), for_all(env, policy, lock, workers)
    numbers = [slots.add() for _ in range(workers)]
    with ExitStack() as running, torch.no_grad():
        for own in numbers:
            running.enter_context(
                other_process(step_for_ever, slots.address, own, bell.address, env)
            )
        while True:
            for _ in range(STEPS):
                heard = bell.knocks
                while lacking := workers - len(slots.asking()):
                    assert bell.wait_knock(heard, 60.0, lacking), "a worker process sent no request"
                    heard = bell.knocks
                call()
                slots.answer_all(numbers, 0)
            yield workers * ENVS * STEPS


def step_for_ever(slots: Any, slot: int, bell: Any, make: Any) -> None:
    """Step environments and request actions, without recording."""
    from pycollect._core import WorkerSlot

    end = WorkerSlot(slots, slot, bell)
    envs, action = [make() for _ in range(ENVS)], np.zeros(1, np.float32)
    current = np.stack([env.reset()[0] for env in envs])
    while True:
        ask(end)
        for row, env in enumerate(envs):
            current[row] = env.step(action)[0]


def stepped_alone(workers: int) -> Iterator[int]:
    """Step one worker's environments, one after the other."""
    envs = [Slow() for _ in range(ENVS)]
    action = np.zeros(1, np.float32)
    while True:
        for _ in range(STEPS):
            for env in envs:
                env.step(action)
        yield workers * ENVS * STEPS


def through_a_slot(trips: int) -> Iterator[int]:
    """Answer empty requests of a worker process."""
    from pycollect._core import Bell, ServerSlots

    bell, slots = Bell(), ServerSlots()
    with other_process(ask_for_ever, slots.address, slots.add(), bell.address):
        while True:
            for _ in range(trips):
                heard = bell.knocks
                while not (asking := slots.asking()):
                    bell.wait_knock(heard, 1.0)
                    heard = bell.knocks
                slots.answer(asking[0])
            yield trips


def ask_for_ever(slots: Any, slot: int, bell: Any) -> None:
    """Send empty requests as a worker."""
    from pycollect._core import WorkerSlot

    end = WorkerSlot(slots, slot, bell)
    while True:
        ask(end)


def ask(end: Any) -> None:
    """Send a request through a slot, and wait for the answer."""
    answered = end.ask(b"", 1.0)
    while not answered:
        answered = end.wait_answer(1.0)


def bare(trips: int) -> Iterator[int]:
    """Run two processes that wake each other by a futex, in C."""
    source = Path(__file__).parent / "cpp" / "ping_pong.cpp"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ping_pong"
        subprocess.run(["c++", "-O2", "-std=c++20", source, "-o", program], check=True)
        command = [program, str(trips)]
        with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as running:
            assert running.stdin is not None
            assert running.stdout is not None
            while True:
                running.stdin.write("\n")
                running.stdin.flush()
                running.stdout.readline()
                yield trips


@contextmanager
def other_process(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Run a function in another process during the block."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


CASES = {on_device: "device", lstm: "lstm", nature: "nature"}


def device_of(folder: Path, side: str) -> str:
    """Return a device of one side, because a side that works ahead may lock it in other turns."""
    lock = folder / f"device of {side}"
    lock.touch()
    return str(lock)


@pytest.mark.parametrize(
    ("name", "env", "policy", "workers"),
    [
        ("2 ms device", Still, on_device, 1),
        pytest.param("2 ms device", Still, on_device, 8, marks=pytest.mark.full),
        pytest.param("LSTM of 256", Still, lstm, 8, marks=pytest.mark.full),
        pytest.param("Nature CNN", FreeFrames, nature, 1, marks=pytest.mark.full),
        pytest.param("Nature CNN", FreeFrames, nature, 4, marks=pytest.mark.full),
        pytest.param("Nature CNN", FreeFrames, nature, 8, marks=pytest.mark.full),
    ],
)
def test_central(
    compare: Callable[..., None], tmp_path: Path, name: str, env: Any, policy: Any, workers: int
) -> None:
    """Compare one call for all workers with one call for each."""
    held = policy is on_device

    def side(name: str, stream: Callable[..., Iterator[int]], **kwargs: Any) -> Side:
        own = {"env": env, "policy": policy, "lock": device_of(tmp_path, name), "workers": workers}
        return Side(name, stream, {**own, **kwargs})

    others = []
    if SAMPLE_FACTORY in os.environ:
        case = {"case": CASES[policy], "lock": device_of(tmp_path, "it"), "workers": workers}
        others.append(Side("Sample Factory", sample_factory, case))
    compare(
        f"central inference, {name}, {workers} processes of {ENVS}, T={STEPS}",
        [
            side("pycollect, central", central),
            side(PROCESS, by_a_process),
            side(WORKERS, central, inference=None),
            replace(side(PEER, torchrl), needs="torchrl", spawns=True),
            *others,
            replace(side(UNRECORDED, unrecorded), spawns=True),
            side(ALONE, alone),
        ],
        frame_bytes=2 * env().observation_space.sample().nbytes,
        wanted={ALONE: 0.9, WORKERS: 4.0} if held and workers > 1 else {},
    )


@pytest.mark.full
@pytest.mark.parametrize("workers", [2, 8])
def test_in_groups(compare: Callable[..., None], tmp_path: Path, workers: int) -> None:
    """Compare `env_groups=2`: one half of the environments steps while the policy acts."""

    def side(name: str, stream: Callable[..., Iterator[int]], **kwargs: Any) -> Side:
        own = {"env": Slow, "policy": on_device, "workers": workers}
        return Side(name, stream, {**own, "lock": device_of(tmp_path, name), **kwargs})

    ones = "pycollect, central, one group", f"{PROCESS}, one group"
    compare(
        f"central inference, 2 ms device, {workers} processes of {ENVS} environments of 1 ms, "
        f"T={STEPS}",
        [
            side("pycollect, central, env_groups=2", central, env_groups=2),
            side(ones[0], central),
            side(f"{PROCESS}, env_groups=2", by_a_process, env_groups=2),
            side(ones[1], by_a_process),
            Side(STEPPED, stepped_alone, {"workers": workers}),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={ones[0]: 1.2},
    )


@pytest.mark.parametrize("case", ["equal", pytest.param("one of 20 ms", marks=pytest.mark.full)])
def test_slow_calls(compare: Callable[..., None], tmp_path: Path, case: str) -> None:
    """Compare calls for all environments with calls that do not wait for the slowest."""

    def side(name: str, stream: Callable[..., Iterator[int]], **kwargs: Any) -> Side:
        return Side(name, stream, {"case": case, "lock": device_of(tmp_path, name), **kwargs})

    workers = len(SLOW[case])
    sync = "pycollect, central"
    others = []
    if SAMPLE_FACTORY in os.environ:
        own = {
            "case": "device",
            "lock": device_of(tmp_path, "it"),
            "workers": workers,
            "envs": 1,
            "call": SLOW_CALL_SECONDS,
            "waits": [env.seconds for env in SLOW[case]],
        }
        others.append(Side("Sample Factory", sample_factory, own))
    compare(
        f"central inference, 5 ms device, {workers} processes of one environment of 1 ms, {case}, "
        f"T={STEPS}",
        [
            replace(side(PROCESS, slow_central, sync=False), group=workers, ahead=1),
            side(sync, slow_central, sync=True),
            replace(side("AsyncVectorEnv", slow_loop, subproc=False), spawns=True),
            replace(
                side("SubprocVecEnv", slow_loop, subproc=True),
                needs="stable_baselines3",
                spawns=True,
            ),
            *others,
        ],
        frame_bytes=FRAME_BYTES,
        wanted={sync: 0.95 if case == "equal" else 1.0},
    )


def test_a_round_trip(compare: Callable[..., None], smoke: bool) -> None:
    """Compare a request with a bare round trip."""
    trips = {"trips": 100 if smoke else 10_000}
    compare(
        "round trips of a worker that asks a server",
        [
            Side("pycollect, through a slot", through_a_slot, trips),
            Side(BARE, bare, trips),
        ],
        frame_bytes=0,
        wanted={BARE: 1 / 1.5},
    )

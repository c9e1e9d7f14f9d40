"""Ways to collect frames of 84x84x4 bytes with a Nature CNN on a device, each in its own process.

    python -m pycollect.bench.pixels SIDE PROCESSES SECONDS DEVICE

measures one side and prints two rows as JSON. Separate processes share no imported libraries,
profiler or CUDA context.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from tempfile import TemporaryFile
from typing import Any

import torch
from tensordict import TensorDictBase

from pycollect import MultiSyncDataCollector
from pycollect.bench.clock import durations, seconds_of
from pycollect.bench.report import Row, missing
from pycollect.bench.sides import (
    FreeFrames,
    NatureCNN,
    Stream,
    captured_calls,
    lacks,
    nature_policy,
    ours,
    torchrls,
)

STEPS = 128
"""Frames per environment in a batch."""
MOST_SECONDS = 60
"""Time limit of the process of a side, besides the time of measuring."""

_Side = Callable[[int, torch.device], Stream]


def side_rows(side: str, processes: int, seconds: float, device: torch.device) -> list[Row]:
    """Measure a side for at least 3 batches; return its rate and the time to the first batch."""
    name = f"{side}, {processes}"
    if reason := lacks("torchrl") if "TorchRL" in side else "":
        return _missing(name, reason)
    command = [sys.executable, "-m", __spec__.name, side, str(processes), str(seconds), str(device)]
    # Files, because a process that a library leaves running would keep a pipe open.
    with TemporaryFile("w+") as printed, TemporaryFile("w+") as log:
        child = subprocess.Popen(command, stdout=printed, stderr=log, start_new_session=True)
        try:
            child.wait(MOST_SECONDS + seconds)
        except subprocess.TimeoutExpired:
            return _missing(name, f"it took longer than {MOST_SECONDS + seconds:g} s")
        finally:
            with suppress(ProcessLookupError):  # a library may leave descendants running
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        printed.seek(0)
        log.seek(0)
        rows, logged = printed.read(), log.read()
    sys.stderr.write(logged)
    if child.returncode != 0:
        return _missing(name, f"it failed: {(logged.strip().splitlines() or ['no message'])[-1]}")
    return [Row(**row) for row in json.loads(rows.splitlines()[-1])]


def _missing(name: str, why: str) -> list[Row]:
    return [missing(name, why), missing(_first(name), why)]


def _first(name: str) -> str:
    return f"{name}, first batch"


def _ours(count: int, device: torch.device, **more: Any) -> Stream:
    arguments = _common(count, device)
    return ours("MultiSyncDataCollector", **arguments, storing_device=device, prefetch=1, **more)


def _common(count: int, device: torch.device) -> dict[str, Any]:
    return {
        "env": [FreeFrames] * count,
        "policy": nature_policy,
        "read": partial(_read_on, device),
        "frames_per_batch": STEPS * count,
        "policy_device": device,
    }


def _read_on(device: torch.device, batch: TensorDictBase) -> int:
    """Move a batch to the learner's device; copy nothing if it is there."""
    there = batch.to(device)
    if there["observation"].device.type != device.type:
        raise RuntimeError(f"expected a batch on {device}, got {there}")
    frames: int = there.numel()
    return frames


def _beside_torchrl(count: int, device: torch.device) -> Stream:
    """Collect in a program that has imported TorchRL's environments."""
    importlib.import_module("torchrl.envs")
    return _ours(count, device)


def _torchrls(count: int, device: torch.device, *, stores_there: bool) -> Stream:
    """Collect with TorchRL; unless it stores on the device, each batch is copied there."""
    storing = device if stores_there else "cpu"
    arguments = _common(count, device)
    return torchrls("MultiSyncDataCollector", **arguments, env_device="cpu", storing_device=storing)


def _torchrls_central(count: int, device: torch.device) -> Stream:
    """Collect with TorchRL's inference server: one policy for all environments."""
    from torchrl.modules.inference_server import InferenceDeviceConfig

    return torchrls(
        "AsyncBatchedCollector",
        [FreeFrames] * count,
        lambda: nature_policy().to(device),
        read=partial(_read_on, device),
        frames_per_batch=STEPS * count,
        env_backend="multiprocessing",
        policy_backend="threading",
        device_config=InferenceDeviceConfig(
            policy_device=device, output_device="cpu", env_device="cpu", storing_device="cpu"
        ),
    )


def _loop(count: int, device: torch.device) -> Stream:
    """Collect by hand: AsyncVectorEnv and one copy through pinned memory each way per step."""
    from gymnasium.vector import AsyncVectorEnv

    # Its processes are forked before CUDA is opened.
    env = AsyncVectorEnv([FreeFrames] * count, context="fork", copy=False)
    policy = nature_policy().module.to(device)
    seen, _ = env.reset()
    host = torch.empty(seen.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    with closing(env), torch.no_grad():
        while True:
            before = torch.empty((STEPS, *seen.shape), dtype=torch.uint8, device=device)
            after = torch.empty_like(before)
            host.copy_(torch.from_numpy(seen))
            before[0].copy_(host, non_blocking=True)
            for t in range(STEPS):
                action = policy(before[t]).cpu().numpy()
                seen, *_ = env.step(action)
                host.copy_(torch.from_numpy(seen))
                after[t].copy_(host, non_blocking=True)
                if t + 1 < STEPS:
                    before[t + 1].copy_(after[t])
            yield STEPS * count


def _policy_alone(count: int, device: torch.device, *, captured: bool = False) -> Stream:
    """Call the policy as the loop by hand does, without environments; keep no frames."""
    policy = nature_policy().module.to(device)
    shape = (count, 4, 84, 84)
    seen = torch.zeros(shape, dtype=torch.uint8)
    host = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(shape, dtype=torch.uint8, device=device)
    act: Callable[[], torch.Tensor] = partial(policy, there)
    with torch.no_grad():
        if captured and device.type == "cuda":
            act = captured_calls(act)
        while True:
            for _ in range(STEPS):
                host.copy_(seen)
                there.copy_(host, non_blocking=True)
                act().cpu()
            yield STEPS * count


def _environments_alone(count: int, device: torch.device) -> Stream:
    """Step one environment and copy its frames; all processes together take as long per batch."""
    env = FreeFrames()
    seen, _ = env.reset()
    room = torch.zeros((2, STEPS, *seen.shape), dtype=torch.uint8).numpy()
    with closing(env):
        while True:
            for t in range(STEPS):
                room[0, t] = seen
                seen, _, _, ended, _ = env.step(0)
                room[1, t] = seen
                if ended:
                    seen, _ = env.reset()
            yield STEPS * count


class _Count:
    """A replay buffer that counts frames without storing them."""

    frames = 0

    def extend(self, td: TensorDictBase) -> None:
        self.frames += td.numel()


def _started(count: int, device: torch.device, *, learns: bool) -> Stream:
    """Collect in the background; `learns` queues training steps meanwhile and never waits."""
    buffer = _Count()
    collector = MultiSyncDataCollector(
        [FreeFrames] * count,
        nature_policy(),
        frames_per_batch=STEPS * count,
        policy_device=device,
        inference="central",
        cudagraph_policy=device.type == "cuda",
        replay_buffer=buffer,
    )
    net = NatureCNN(1).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    frames = torch.zeros((256, 4, 84, 84), dtype=torch.uint8, device=device)

    def learn() -> None:
        net(frames).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with collector:
        learn()
        collector.start()
        while True:
            goal = buffer.frames + STEPS * count
            while buffer.frames < goal:
                if learns:
                    learn()
                else:
                    time.sleep(0.001)
            yield STEPS * count


PEERS = ("TorchRL", "TorchRL, storing there", "TorchRL, AsyncBatchedCollector")
LOOP, ENVS = "AsyncVectorEnv loop", "environments alone"
POLICY, CAPTURED = "policy alone", "policy alone, captured"
SIDES: dict[str, _Side] = {
    "central": partial(_ours, inference="central"),
    "central, captured": partial(_ours, inference="central", cudagraph_policy=True),
    "a policy each": _ours,
    "a policy each, captured": partial(_ours, cudagraph_policy=True),
    LOOP: _loop,
    POLICY: _policy_alone,
    CAPTURED: partial(_policy_alone, captured=True),
    PEERS[0]: partial(_torchrls, stores_there=False),
    PEERS[1]: partial(_torchrls, stores_there=True),
    PEERS[2]: _torchrls_central,
    ENVS: _environments_alone,
    "start() without a learner": partial(_started, learns=False),
    "start() beside a learner": partial(_started, learns=True),
    "a policy each, beside torchrl": _beside_torchrl,
}
"""Functions that start each side, by the name of its row."""
QUICK_SIDES = ("central", "a policy each", LOOP, POLICY, PEERS[0])


def compared(row: Row) -> Row:
    """Return the row of a side's rate with the names of its limit and its peer."""
    side, _, processes = row.name.rpartition(", ")
    alone = CAPTURED if "captured" in side or "start()" in side else POLICY
    return replace(
        row,
        limit=None if side in (POLICY, CAPTURED, ENVS) else f"{alone}, {processes}",
        peer=None if side in PEERS else f"{PEERS[0]}, {processes}",
    )


def measured(side: str, processes: int, seconds: float, device: torch.device) -> list[Row]:
    """Measure a side in this process; see `side_rows`."""
    start = time.perf_counter()
    stream = SIDES[side](processes, device)
    frames = STEPS * processes

    def batch() -> None:
        if (got := next(stream)) != frames:
            raise RuntimeError(f"expected batches of {frames} frames, got {got}")

    seconds_of(batch, device)
    first = time.perf_counter() - start
    batch()
    times = durations(partial(seconds_of, batch, device), seconds)
    stream.close()
    name = f"{side}, {processes}"
    note = f"{len(times)} batches; slowest {1e3 * max(times):.3g} ms"
    return [
        compared(Row(name, seconds=statistics.mean(times), frames=frames, note=note)),
        Row(_first(name), seconds=first, note="from the constructor on"),
    ]


def main(arguments: Sequence[str]) -> None:
    """Measure the side in the arguments, and print its rows."""
    side, processes, seconds, device = arguments
    torch.set_num_threads(1)  # as workers have it
    rows = measured(side, int(processes), float(seconds), torch.device(device))
    print(json.dumps([asdict(row) for row in rows]), flush=True)
    os._exit(0)  # some libraries hang at the end of a program


if __name__ == "__main__":
    main(sys.argv[1:])

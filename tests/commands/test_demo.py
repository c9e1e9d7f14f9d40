"""The demo: its PPO against a plain model, and its command line as a user runs it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from envs_for_tests import CountingEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

pytest.importorskip("gymnasium")

import pycollect
from pycollect.__main__ import main
from pycollect.demo import cli
from pycollect.demo.cli import drawn, save_plot, summary
from pycollect.demo.ppo import PPO, ActorCritic, PPOConfig, advantages_and_returns, ppo_loss
from pycollect.demo.train import Interrupt, Point, Run, make_task, train

PNG = b"\x89PNG\r\n\x1a\n"

# --- PPO ---


def random_batch(seed: int, batch: list[int], steps: int) -> TensorDict:
    """Return a random batch of shape [*batch, steps] with the collectors' keys.

    Trajectories have random lengths. They are terminated, truncated or just cut, and may be
    followed by a cell without a frame.
    """
    rng = torch.Generator().manual_seed(seed)
    shape = (*batch, steps)
    last = torch.rand(shape, generator=rng) < 0.3
    first = last.roll(1, -1)
    first[..., 0] = False
    offset = 100 * torch.arange(math.prod(batch)).reshape(*batch, 1)
    ids = first.cumsum(-1) + offset
    ids[first & (torch.rand(shape, generator=rng) < 0.5)] = -1
    ending = torch.randint(3, shape, generator=rng)  # 2: the id changes without a done flag
    flags = [(last & (ids >= 0) & (ending == kind)).unsqueeze(-1) for kind in (0, 1)]
    states = torch.randn(*batch, steps + 1, 3, generator=rng)
    following = states[..., 1:, :].clone()
    following[last] = torch.randn(int(last.sum()), 3, generator=rng)
    return TensorDict(
        {
            "observation": states[..., :-1, :],
            "action": torch.randint(2, shape, generator=rng),
            "sample_log_prob": torch.full(shape, 0.5).log(),
            "next": {
                "observation": following,
                "reward": torch.randn(*shape, 1, generator=rng),
                "terminated": flags[0],
                "truncated": flags[1],
                "done": flags[0] | flags[1],
            },
            "collector": {"traj_ids": ids, "mask": ids >= 0},
        },
        shape,
    )


def naive_advantages(net: ActorCritic, batch: TensorDict, config: PPOConfig) -> dict[int, list]:
    """Compute each trajectory's advantages from the definition: a sum of discounted errors."""
    result = {}
    ids = batch["collector", "traj_ids"].flatten()
    frames = batch.reshape(-1)
    for trajectory in ids[ids >= 0].unique().tolist():
        part = frames[ids == trajectory]
        value = net(part["observation"])[1]
        following = net(part["next", "observation"])[1]
        following = following * ~part["next", "terminated"].squeeze(-1)
        error = part["next", "reward"].squeeze(-1) + config.gamma * following - value
        decay = config.gamma * config.gae_lambda
        result[trajectory] = [
            sum(float(error[later]) * decay ** (later - t) for later in range(t, len(error)))
            for t in range(len(error))
        ]
    return result


@given(
    seed=st.integers(0, 2**31),
    batch=st.sampled_from([[], [1], [3], [2, 3], [2, 1]]),
    steps=st.integers(1, 17),
)
@settings(deadline=None, max_examples=30)
def test_advantages_depend_only_on_their_trajectory(
    seed: int, batch: list[int], steps: int
) -> None:
    torch.manual_seed(0)
    net = ActorCritic((3,), 2)
    td, config = random_batch(seed, batch, steps), PPOConfig()
    with torch.no_grad():
        advantage, target = advantages_and_returns(net, td, config)
        expected = naive_advantages(net, td, config)
        value = net(td["observation"])[1]
    assert advantage.shape == target.shape == td.shape
    ids = td["collector", "traj_ids"]
    for trajectory, values in expected.items():
        torch.testing.assert_close(
            advantage[ids == trajectory], torch.tensor(values), rtol=1e-4, atol=1e-4
        )
    torch.testing.assert_close((advantage + value)[ids >= 0], target[ids >= 0])


def test_cells_without_a_frame_change_nothing() -> None:
    batch = random_batch(3, [2, 3], 16)
    empty = ~batch["collector", "mask"]
    assert empty.any()
    poisoned = batch.clone()
    for key in ("observation", "sample_log_prob", ("next", "observation"), ("next", "reward")):
        poisoned[key][empty] = float("nan")
    assert parameters_after(batch) == parameters_after(poisoned)


def test_the_learning_rate_depends_on_the_remaining_frames() -> None:
    batch = random_batch(0, [4], 16)
    assert parameters_after(batch, remaining=0.0) == parameters_after(batch, remaining=-0.1)
    assert parameters_after(batch, remaining=0.0) != parameters_after(batch, remaining=1.0)


def parameters_after(batch: TensorDict, remaining: float = 1.0) -> list[float]:
    torch.manual_seed(0)
    net = ActorCritic((3,), 2)
    PPO(net, PPOConfig(minibatch=32)).learn(batch, remaining)
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


@pytest.mark.parametrize(("advantage", "moves"), [(1.0, False), (-1.0, True)])
def test_the_surrogate_is_clipped_on_the_profitable_side_only(
    advantage: float, moves: bool
) -> None:
    torch.manual_seed(0)
    net = ActorCritic((3,), 2)
    old = torch.full((8,), 0.1).log()  # every action is now far more likely
    loss = ppo_loss(
        net,
        PPOConfig(value_weight=0.0, entropy_weight=0.0),
        torch.randn(8, 3),
        torch.zeros(8, dtype=torch.int64),
        old,
        torch.full((8,), advantage),
        torch.zeros(8),
    )
    gradient = torch.autograd.grad(loss, next(net.actor.parameters()))[0]
    assert bool(gradient.abs().sum() > 0) is moves


def test_pixels_are_scaled_and_keep_their_batch_shape() -> None:
    net = ActorCritic((4, 84, 84), 6)
    frames = torch.full((2, 3, 4, 84, 84), 255, dtype=torch.uint8)
    logits, value = net(frames)
    assert logits.shape == (2, 3, 6)
    assert value.shape == (2, 3)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        net.body[0].net(torch.ones(1, 4, 84, 84)), net.body[0](frames[0, :1])
    )


def test_the_policy_records_its_action_and_the_log_probability() -> None:
    torch.manual_seed(0)
    net = ActorCritic((3,), 4)
    td = net.policy()(TensorDict({"observation": torch.randn(5, 3)}, [5]))
    log_probs = net(td["observation"])[0].log_softmax(-1)
    expected = log_probs.gather(-1, td["action"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(td["sample_log_prob"], expected)


def test_it_learns() -> None:
    task = replace(make_task("CartPole-v1", workers=1), frames=40_000, target=None)
    run = train(task, 0, seed=0)
    first, last = run.points[1].mean_return, run.points[-1].mean_return
    assert first < 60
    assert last > first + 100
    assert run.outcome == "budget"
    assert run.points[-1].frames == run.stats["frames"] >= 40_000


# --- the summary and the plot ---


def run_of(points: list[Point], **changes: Any) -> Run:
    return replace(Run(make_task("CartPole-v1", workers=1), points=points), **changes)


@pytest.mark.parametrize("name", ["SyncDataCollector", "MultiSyncDataCollector"])
def test_the_summary_accounts_for_all_of_the_time(name: str) -> None:
    with getattr(pycollect, name)([CountingEnv], None, frames_per_batch=50) as collector:
        collector.next()
        collector.next()
        stats = {**collector.stats(), "episodes": 120, "episode_return": 480.0}
    text = summary(run_of([Point(8.0, 100, 1.0)], stats=stats, outcome="target"))
    rows = {line[:24].strip(): line[24:].split() for line in text.splitlines() if line[24:]}
    within = {"environments", "policy", "recording"}
    assert within <= set(rows) if name == "SyncDataCollector" else "waiting for workers" in rows
    shares = [float(own[1][:-1]) for own in rows.values() if own[-1].endswith("%")]
    assert shares.pop() == 100  # the total
    assert sum(shares) <= 100.5
    assert int(rows["of each worker"][0].replace(",", "")) > 0
    assert rows["frames/s"] == ["12"]
    assert "Solved" in text
    assert "480.0 of the last 100 episodes" in text


def test_the_summary_of_a_run_without_a_batch() -> None:
    stats = {"workers": {0: {"seconds": {}}}}  # of a worker that has delivered nothing
    text = summary(run_of([], stats=stats, outcome="interrupted"))
    assert "Interrupted" in text
    assert "mean return             -" in text


@pytest.mark.parametrize(
    ("returns", "panels"),
    [([float("nan")], 1), ([float("nan"), 5.0], 2), ([float(t) for t in range(8)], 2)],
    ids=["none has ended", "one point", "many"],
)
def test_no_panel_of_the_plot_is_empty(returns: list[float], panels: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = run_of([Point(t + 0.5, 64 * (t + 1), value) for t, value in enumerate(returns)])
    figure = drawn(run, "title")
    assert len(figure.axes) == panels
    for axes in figure.axes:
        line = axes.lines[0] if axes.lines else None
        seen = line is not None and (len(line.get_xdata()) > 1 or line.get_marker() == "o")
        assert seen or axes.patches
    path = save_plot(run, "title", tmp_path / "new" / "folder")
    assert path.read_bytes().startswith(PNG)


# --- the command line ---


def demo(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    """Run the command as a user does, in another directory and in its own process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "pycollect", "demo", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


BACKENDS = ["single", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]


# CI runs the demo on Ray out of the wheel.
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_command(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    process = demo("--backend", backend, "--frames", "8192", "--output", "plots", folder=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "where the time went" in out
    assert "The frame budget is used up" in out
    assert "frames/s" in out
    assert "return" in err  # the progress bar
    path = tmp_path / out.split()[-1]
    assert path == tmp_path / "plots" / "CartPole-v1.png"
    assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "to_group",
    [pytest.param(False, id="pid", marks=pytest.mark.slow), pytest.param(True, id="group")],
)
def test_ctrl_c_ends_with_the_summary_and_leaves_nothing(
    backend: str, to_group: bool, tmp_path: Path
) -> None:
    """A terminal sends SIGINT to the whole group, `kill -INT` only to the process."""
    process = demo(
        *("--backend", backend, "--frames", "100000000", "--target", "1000"), folder=tmp_path
    )
    await_progress(process)
    descendants = psutil.Process(process.pid).children(recursive=True)
    (os.killpg if to_group else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Interrupted." in out
    assert "where the time went" in out
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(descendants, timeout=10)
    assert alive == []
    if backend == "ray":
        assert descendants


@pytest.mark.slow
@pytest.mark.ray
def test_ctrl_c_while_ray_starts_leaves_nothing(tmp_path: Path) -> None:
    process = demo(folder=tmp_path)
    assert process.stdout is not None
    assert "PPO" in process.stdout.readline()
    time.sleep(2)
    os.kill(process.pid, signal.SIGINT)
    descendants = psutil.Process(process.pid).children(recursive=True)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Interrupted." in out
    assert "Traceback" not in err
    assert psutil.wait_procs(descendants, timeout=10)[1] == []


def test_a_second_ctrl_c_interrupts_only_permitted_code() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert interrupt.requested
            with pytest.raises(KeyboardInterrupt), interrupt.insistence():
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_ctrl_c_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def await_progress(process: subprocess.Popen[str]) -> None:
    """Read the progress bar until it shows a return, which means that the first batch is done."""
    assert process.stderr is not None
    seen, end = "", time.monotonic() + 120
    while ", return" not in seen:
        character = process.stderr.read(1)
        assert character, f"ended before it began: {seen}"
        assert time.monotonic() < end, seen
        seen += character


def test_atari_frames_are_trained_on_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ale_py")
    arguments = ["demo", "--env", "ALE/Pong-v5", "--backend", "single", "--envs-per-worker", "2"]
    code = main([*arguments, "--frames", "256", "--output", str(tmp_path)])
    out = capsys.readouterr().out
    assert code == 0
    assert "frames                  256" in out
    assert (tmp_path / "ALE-Pong-v5.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("absent", "arguments", "advice"),
    [
        ("ray", [], "--backend single"),
        ("ray", [], "pip install ray"),
        ("gymnasium", ["--backend", "single"], "pip install gymnasium"),
        ("ale_py", ["--env", "ALE/Pong-v5"], "pip install ale-py opencv"),
    ],
)
def test_a_missing_package_is_named(
    absent: str,
    arguments: list[str],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "is_installed", lambda module: module != absent)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2
    assert advice in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_does_not_hide_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "CartPole-v1.png").mkdir()
    arguments = ["--backend", "single", "--frames", "2048", "--output", str(tmp_path)]
    assert main(["demo", *arguments]) == 0
    told = capsys.readouterr().out
    assert "frames/s" in told
    assert "CartPole-v1.png" in told


def test_without_matplotlib_there_is_no_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "is_installed", lambda module: module != "matplotlib")
    arguments = ["--backend", "single", "--frames", "2048", "--output", str(tmp_path)]
    assert main(["demo", *arguments]) == 0
    assert "matplotlib" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--env", "Pendulum-v1"], "Discrete actions"),
        (["--env", "FrozenLake-v1"], "float32 vectors"),
        (["--env", "NoSuchEnv-v0"], "NoSuchEnv"),
        (["--workers", "2", "--backend", "single"], "--envs-per-worker"),
        (["--frames", "0"], "at least 1"),
        (["--frames", "9" * 30], "--frames"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "9" * 30], "--seed"),
        (["--backend", "single", "--output", "/dev/null/folder"], "--output"),
        (["--workers", "two"], "two"),
        (["--backend", "threads"], "single"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err

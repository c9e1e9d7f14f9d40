"""`TrajectoryQueue` against a naive model, over random schedules of rollouts, cuts and pops."""

from __future__ import annotations

from collections import Counter
from operator import itemgetter

import torch
from arrays_for_tests import batch_shapes  # noqa: F401 (the module loads the profile)
from hypothesis import given
from hypothesis import strategies as st
from raising import refused
from tensordict import NonTensorStack, TensorDict

from pycollect.data.trajectory_queue import TrajectoryQueue


def rollout(frames: list[int], ids: list[int], dones: list[int]) -> TensorDict:
    """Return a rollout of shape [T]; an id of -1 marks an uncollected cell."""
    numbers = torch.tensor(frames, dtype=torch.int64)
    done = torch.tensor(dones, dtype=torch.bool).unsqueeze(-1)
    return TensorDict(
        {
            "observation": numbers.unsqueeze(-1) * torch.ones(2),
            "next": {"frame": numbers, "done": done},
            "collector": {"traj_ids": torch.tensor(ids, dtype=torch.int64)},
        },
        [len(frames)],
    )


class Env:
    """Number the frames over all envs, in trajectories that end at random or are cut."""

    def __init__(self, first_id: int) -> None:
        self.id = first_id
        self.open: list[int] = []
        self.frames = self.begun = 0

    def roll(self, steps: int, data: st.DataObject, clock: list[int], complete: list) -> TensorDict:
        frames, ids, dones = [], [], []
        for _ in range(steps):
            event = data.draw(st.sampled_from(["step", "step", "done", "cut", "skip"]))
            if event == "skip":
                frames.append(-7)
                ids.append(-1)
                dones.append(1)  # uncollected cells must be ignored
                continue
            if event == "cut" and self.open:
                self.open = []
                self.id += 100
            if not self.open:
                self.begun = self.frames
            self.frames += 1
            clock[0] += 1
            self.open.append(clock[0])
            frames.append(clock[0])
            ids.append(self.id)
            dones.append(int(event == "done"))
            if event == "done":
                complete.append((self.begun, self.open))
                self.open = []
                self.id += 100
        return rollout(frames, ids, dones)


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from(["padded", "cat"]), st.data())
def test_every_complete_trajectory_is_returned_once_and_all_frames_counted(
    n: int, envs: int, form: str, data: st.DataObject
) -> None:
    queue = TrajectoryQueue(n, form)
    workers = {worker: [Env(10 * worker + p) for p in range(envs)] for worker in range(2)}
    complete: list[list[int]] = []
    clock = [0]
    pushed: Counter[int] = Counter()
    popped: Counter[int] = Counter()
    lost: Counter[int] = Counter()
    given_out = 0
    for _ in range(data.draw(st.integers(1, 8))):
        worker = data.draw(st.sampled_from([0, 1]))
        action = data.draw(st.sampled_from(["push", "push", "push", "pop", "cut", "clear"]))
        if action == "push":
            steps = data.draw(st.integers(0, 6))
            done_before = len(complete)
            ended: list[tuple[int, list[int]]] = []
            rows = [env.roll(steps, data, clock, ended) for env in workers[worker]]
            ended.sort(key=itemgetter(0))  # by their start, then by row
            complete[done_before:] = [trajectory for _, trajectory in ended]
            td = torch.stack(rows) if envs > 1 else rows[0]
            pushed[worker] += int((td["collector", "traj_ids"] != -1).sum())
            lost[worker] += queue.push(worker, td)
            td["next", "frame"].fill_(-99)  # the memory is reused after push
        elif action == "cut":
            cut = sum(len(env.open) for env in workers[worker])
            assert queue.cut(worker) == cut
            lost[worker] += cut
            for env in workers[worker]:
                env.open = []
                env.id += 100
        elif action == "clear":
            lost.update(queue.held)
            queue.clear()
            complete.clear()
            for env in [env for some in workers.values() for env in some]:
                env.open = []
                env.id += 100
        else:
            batch = queue.pop()
            assert (batch is None) == (len(complete) < n)
            if batch is not None:
                check(batch, complete[:n], form, given_out)
                del complete[:n]
                given_out += n
                popped.update(batch.frames)
        held = Counter(queue.held)
        waiting = sum(map(len, complete)) + sum(
            len(e.open) for some in workers.values() for e in some
        )
        assert sum(held.values()) == waiting
        for name in workers:
            assert pushed[name] == popped[name] + held[name] + lost[name]


def check(batch: tuple, expected: list[list[int]], form: str, first_id: int) -> None:
    td, frames = batch
    lengths = torch.tensor([len(trajectory) for trajectory in expected])
    assert sum(frames.values()) == int(lengths.sum())
    assert td.names[-1] == "time"
    if form == "padded":
        mask = td["collector", "mask"]
        assert td.shape == (len(expected), int(lengths.max()))
        assert torch.equal(mask.sum(1), lengths)
        assert (td["collector", "traj_ids"][~mask] == -1).all()
        assert not td["observation"][~mask].any()
        td = td[mask]
    flat = [frame for trajectory in expected for frame in trajectory]
    assert td["next", "frame"].tolist() == flat
    assert td["observation"][:, 0].tolist() == flat
    assert torch.equal(
        td["collector", "traj_ids"],
        torch.arange(first_id, first_id + len(expected)).repeat_interleave(lengths),
    )
    ends = td["next", "done"].squeeze(-1).nonzero().squeeze(-1)
    assert torch.equal(ends, lengths.cumsum(0) - 1)


def test_trajectories_span_rollouts() -> None:
    queue = TrajectoryQueue(2)
    assert queue.push("a", rollout([1, 2, 3], [0, 0, 0], [0, 0, 0])) == 0
    assert queue.push("b", rollout([4, 5, 6], [0, 0, 1], [0, 1, 0])) == 0
    assert queue.pop() is None
    assert queue.held == {"a": 3, "b": 3}
    assert queue.push("a", rollout([7, 8], [0, 1], [1, 0])) == 0
    batch = queue.pop()
    assert batch is not None
    assert batch.td["next", "frame"].tolist() == [[4, 5, 0, 0], [1, 2, 3, 7]]
    assert batch.td["collector", "traj_ids"].tolist() == [[0, 0, -1, -1], [1, 1, 1, 1]]
    assert batch.frames == {"a": 4, "b": 2}
    assert queue.held == {"a": 1, "b": 1}
    assert queue.next_id == 2
    queue.clear()
    assert queue.held == {}


def test_a_trajectory_that_was_cut_is_lost() -> None:
    queue = TrajectoryQueue(1, "cat", next_id=7)
    queue.push(0, rollout([1, 2], [0, 0], [0, 0]))
    assert queue.push(0, rollout([3, 4], [1, 1], [0, 1])) == 2
    batch = queue.pop()
    assert batch is not None
    assert batch.td["next", "frame"].tolist() == [3, 4]
    assert batch.td["collector", "traj_ids"].tolist() == [7, 7]
    queue.push(0, rollout([5, 6], [2, 2], [0, 0]))
    assert queue.cut(1) == 0
    assert queue.cut(0) == 2
    assert queue.held == {}


def test_without_ids_trajectories_continue_until_their_done() -> None:
    queue = TrajectoryQueue(1, "cat")
    queue.push(0, rollout([1, 2], [0, 0], [0, 0]).exclude("collector"))
    queue.push(0, rollout([3, 4], [0, 0], [1, 0]).exclude("collector"))
    batch = queue.pop()
    assert batch is not None
    assert batch.td["next", "frame"].tolist() == [1, 2, 3]
    assert set(batch.td.keys()) == {"observation", "next", "collector"}
    assert queue.held == {0: 1}


def test_groups_of_agents_keep_their_batch_dimensions() -> None:
    td = TensorDict({("collector", "traj_ids"): torch.tensor([0, 0])}, [2])
    td["next", "agents"] = TensorDict(
        {"x": torch.rand(2, 3), "done": torch.tensor([[0, 0, 0], [0, 1, 0]]).bool()}, [2, 3]
    )
    queue = TrajectoryQueue(1)
    queue.push(0, td)
    batch = queue.pop()
    assert batch is not None
    assert batch.td["next", "agents"].batch_size == (1, 2, 3)
    assert torch.equal(batch.td["next", "agents", "x"][0], td["next", "agents", "x"])


def test_objects_stay_with_their_frames() -> None:
    for form in ("padded", "cat"):
        queue = TrajectoryQueue(2, form)
        for text, ids, dones in (("ab", [0, 0], [0, 0]), ("cde", [0, 1, 1], [1, 0, 1])):
            td = rollout([0] * len(text), ids, dones)
            td["text"] = NonTensorStack(*text)
            queue.push(0, td)
        batch = queue.pop()
        assert batch is not None
        texts = batch.td.get("text").tolist()
        assert texts == (list("abcde") if form == "cat" else [list("abc"), ["d", "e", None]])


def test_bad_input_is_named() -> None:
    queue = TrajectoryQueue(2)
    with refused(KeyError, "rollout") as caught:
        queue.push(0, rollout([1], [0], [1]).exclude(("next", "done")))
    assert "next.done" in str(caught.value)
    queue.push(0, rollout([1], [0], [1]))
    other = rollout([1], [0], [1])
    other["next", "frame"] = torch.zeros(1)
    queue.push(1, other)
    with refused(ValueError, "next.frame"):
        queue.pop()
    assert queue.held == {0: 1, 1: 1}
    queue.clear()
    queue.push(0, rollout([1], [0], [1]))
    queue.push(1, rollout([1], [0], [1]).exclude("observation"))
    with refused(ValueError, "observation"):
        queue.pop()

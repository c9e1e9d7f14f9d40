"""`MultiStep` compared with TorchRL's; tests of intended differences show both."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from pycollect import MultiStep, SyncDataCollector, split_trajectories

postprocs = pytest.importorskip("torchrl.data.postprocs")

Oracle = postprocs.MultiStep


def collected(shape: tuple[int, ...], seed: int, done: float = 0.2) -> TensorDict:
    """Return a batch like a collector's."""
    g = torch.Generator().manual_seed(seed)
    terminated = torch.rand((*shape, 1), generator=g) < done
    truncated = torch.rand((*shape, 1), generator=g) < done / 2
    return TensorDict(
        {
            "observation": torch.randn((*shape, 4), generator=g),
            "action": torch.randint(0, 5, shape, generator=g),
            "next": {
                "observation": torch.randn((*shape, 4), generator=g),
                "nested": {"pixels": torch.randint(0, 255, (*shape, 2, 3), generator=g)},
                "reward": torch.randn((*shape, 1), generator=g),
                "done": terminated | truncated,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        shape,
        names=[*[None] * (len(shape) - 1), "time"],
    )


def assert_same(ours: TensorDict, theirs: TensorDict, but: set[object] = frozenset()) -> None:
    """Compare keys, shapes, dtypes, names and values; sums up to the last bits of a float32."""
    assert ours.shape == theirs.shape
    assert ours.names == theirs.names
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key, value in theirs.items(True, True):
        assert ours[key].dtype == value.dtype, key
        assert ours[key].shape == value.shape, key
        if key not in but:
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 20)])
@pytest.mark.parametrize("n", [2, 3, 10, 100])
@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_collected_batches(shape: tuple[int, ...], n: int, gamma: float) -> None:
    td = collected(shape, n)
    assert_same(MultiStep(gamma, n, shift_done=False)(td), Oracle(gamma, n)(td))


def test_split_batches_of_complete_trajectories() -> None:
    td = collected((3, 40), 2)
    for flag in ("done", "terminated"):
        td["next", flag][:, -1] = True
    split = split_trajectories(td)
    mask = split["mask"]
    ours, theirs = MultiStep(0.9, 3, shift_done=False)(split), Oracle(0.9, 3)(split)
    assert_same(ours[mask], theirs[mask])
    assert_same(ours, theirs, but={"gamma", "steps_to_next_obs", "nonterminal"})


def test_as_postproc() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    batches = []
    for postproc in (MultiStep(0.9, 3, shift_done=False), Oracle(0.9, 3)):
        collector = SyncDataCollector(
            lambda: gymnasium.make("CartPole-v1"), frames_per_batch=200, postproc=postproc
        )
        collector.set_seed(0)
        batches.append(next(iter(collector)))
        collector.shutdown()
    assert_same(*batches)


def test_a_module() -> None:
    ours, theirs = MultiStep(0.9, 3), Oracle(0.9, 3)
    assert isinstance(ours, torch.nn.Module)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours.gammas, theirs.gammas)
    assert (ours.gamma, ours.n_steps) == (theirs.gamma, theirs.n_steps)
    td = collected((3, 20), 4)
    step = MultiStep(0.9, 3, shift_done=False).to("cpu")
    assert_same(torch.nn.Sequential(step)(td), torch.nn.Sequential(theirs.to("cpu"))(td))


@pytest.mark.parametrize("how", ["transform", "append", "invert"])
@pytest.mark.parametrize("ndim", [1, 2])
def test_in_a_replay_buffer(how: str, ndim: int) -> None:
    """Apply it to sampled slices, which end with a flag of their own."""
    data = pytest.importorskip("torchrl.data")
    td = collected((4, 30)[2 - ndim :], 5)
    td["collector", "traj_ids"] = torch.zeros(td.shape, dtype=torch.int64)
    td.names = None
    samples = []
    for step in (MultiStep(0.9, 3, shift_done=False), Oracle(0.9, 3)):
        buffer = data.TensorDictReplayBuffer(
            storage=data.LazyTensorStorage(200, ndim=ndim),
            sampler=data.SliceSampler(slice_len=5, end_key=("next", "done"), strict_length=False),
            batch_size=20,
            transform=step if how == "transform" else None,
        )
        if how != "transform":
            buffer.append_transform(step, invert=how == "invert")
        buffer.extend(td)
        torch.manual_seed(0)
        samples.append(buffer.sample())
        state = buffer.state_dict()
        buffer.load_state_dict(state)
    assert_same(*samples)


@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3)])
@pytest.mark.parametrize("time", [1, 2, 10])
@pytest.mark.parametrize("frame", [(), (1,)], ids=["flat", "of one element"])
@pytest.mark.parametrize("rewards", [(), (1,), (3,), (3, 1)], ids=str)
def test_forms_of_a_batch(
    batch: tuple[int, ...], time: int, frame: tuple[int, ...], rewards: tuple[int, ...]
) -> None:
    """Dones, rewards and observations with and without dimensions of their own."""
    g = torch.Generator().manual_seed(0)
    shape = (*batch, time)
    td = TensorDict(
        {
            "next": {
                "observation": torch.randn(*shape, *frame, generator=g),
                "reward": torch.randn(*shape, *rewards, generator=g),
                "done": torch.rand(*shape, *frame, generator=g) < 0.3,
            }
        },
        shape,
    )
    for n in (2, 4):
        theirs = Oracle(0.98, n)(td)
        assert_same(MultiStep(0.98, n, shift_done=False)(td), theirs)


@pytest.mark.parametrize("flags", [(3,), (2, 3)])
def test_flags_of_a_frame_end_trajectories_of_their_own(flags: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    shape = (2, 10, *flags)
    td = TensorDict(
        {
            "action": torch.randn(shape, generator=g),
            "next": {
                "observation": torch.randn(*shape, 4, generator=g),
                "reward": torch.randn(shape, generator=g),
                "done": torch.rand(shape, generator=g) < 0.3,
            },
        },
        (2, 10),
    )
    assert_same(MultiStep(0.9, 3, shift_done=False)(td), Oracle(0.9, 3)(td))


# Differences.


def test_flags_that_not_all_leaves_have_end_a_segment_together() -> None:
    """TorchRL accepts flags per agent only if all leaves have an agent dimension."""
    td = collected((4,), 0, done=0.0)
    td["next", "done"] = torch.zeros(4, 3, dtype=torch.bool)
    td["next", "done"][1, 2] = True
    with pytest.raises(RuntimeError):
        Oracle(0.9, 3)(td)
    assert MultiStep(0.9, 3)(td)["steps_to_next_obs"].tolist() == [2, 1, 2, 1]


def test_flags_are_those_of_the_next_observation() -> None:
    """TorchRL leaves the flags in place: two of three frames bootstrap past the terminal."""
    td = collected((3,), 0, done=0.0)
    td["next", "done"][-1] = td["next", "terminated"][-1] = True
    assert Oracle(0.9, 3)(td)["next", "terminated"].squeeze(-1).tolist() == [False, False, True]
    assert MultiStep(0.9, 3)(td)["next", "terminated"].all()
    assert_same(MultiStep(0.9, 3, shift_done=False)(td), Oracle(0.9, 3)(td))


def test_ids_end_segments() -> None:
    """TorchRL reads the next trajectory if one ends without a done, for example by a reset."""
    td = collected((4,), 0, done=0.0)
    td["collector", "traj_ids"] = torch.tensor([0, 0, 1, 1])
    assert Oracle(0.9, 3)(td)["steps_to_next_obs"].tolist() == [3, 3, 2, 1]
    assert MultiStep(0.9, 3)(td)["steps_to_next_obs"].tolist() == [2, 1, 2, 1]


def test_uncollected_cells_are_not_frames() -> None:
    """TorchRL reads the padding of a trajectory that continues in the next batch."""
    td = collected((2, 3), 0, done=0.0)
    td["collector", "traj_ids"] = torch.tensor([[0, 0, -1], [1, 1, 1]])
    td["collector", "mask"] = td["collector", "traj_ids"] != -1
    td["next", "observation"][0, 2] = 0.0
    ours, theirs = MultiStep(0.9, 3)(td), Oracle(0.9, 3)(td)
    assert not theirs["next", "observation"][0].any()  # all bootstrap from uncollected cells
    assert torch.equal(ours["next", "observation"][0, 0], td["next", "observation"][0, 1])
    assert theirs["steps_to_next_obs"][0].tolist() == [3, 2, 1]
    assert ours["steps_to_next_obs"][0].tolist() == [2, 1, 0]
    torch.testing.assert_close(ours["gamma"], 0.9 ** ours["steps_to_next_obs"])


def test_nonterminal_with_one_step() -> None:
    """TorchRL marks every frame as terminal, for ``n_steps=1`` only."""
    td = collected((10,), 3)
    assert not Oracle(0.9, 1)(td)["nonterminal"].any()
    ours = MultiStep(0.9, 1, shift_done=False)(td)
    assert torch.equal(ours["nonterminal"], Oracle(0.9, 2)(td)["nonterminal"])
    assert_same(ours, Oracle(0.9, 1)(td), but={"nonterminal"})


def test_integer_rewards_become_floats() -> None:
    """TorchRL rounds the discounts to integers: all but the first reward vanish."""
    td = collected((3,), 0, done=0.0)
    td["next", "reward"] = torch.ones(3, 1, dtype=torch.int64)
    assert Oracle(0.5, 3)(td)["next", "reward"].squeeze(-1).tolist() == [1, 1, 1]
    assert MultiStep(0.5, 3)(td)["next", "reward"].squeeze(-1).tolist() == [1.75, 1.5, 1.0]


def test_groups_of_agents() -> None:
    """TorchRL supports one reward and one done, at the root of "next"."""
    td = collected((4,), 0, done=0.0)
    td["next", "agents", "reward"] = torch.ones(4, 3, 1)
    td = td.exclude(("next", "reward"))
    with pytest.raises((KeyError, AttributeError)):
        Oracle(0.5, 2)(td)
    assert torch.equal(
        MultiStep(0.5, 2)(td)["next", "agents", "reward"][:, 0, 0],
        torch.tensor([1.5, 1.5, 1.5, 1.0]),
    )

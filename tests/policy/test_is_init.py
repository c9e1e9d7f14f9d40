"""`is_init`, for policies that read it."""

from __future__ import annotations

import pytest
import torch
from collect_support import IN_PROCESS, collecting
from state_support import ENTRIES, T, entry_of, one, seeded
from tensordict import TensorDict
from tensordict.nn import TensorDictModule


def reads_is_init(td: TensorDict) -> TensorDict:
    td["action"] = td["is_init"].squeeze(-1).long()
    return td


def by_name(observation: torch.Tensor, is_init: torch.Tensor) -> torch.Tensor:
    return is_init.squeeze(-1).long()


IS_INIT = {
    "TensorDictModule": TensorDictModule(
        lambda first: first.squeeze(-1).long(), ["is_init"], ["action"]
    ),
    "callable over a TensorDict": reads_is_init,
    "parameter": by_name,
}


@pytest.mark.parametrize("kind", ENTRIES)
@pytest.mark.parametrize("name", IS_INIT)
@pytest.mark.parametrize("cut", [0, 2])
def test_is_init_marks_the_first_steps_of_trajectories(kind: str, name: str, cut: int) -> None:
    entry, count, _ = entry_of(kind)
    with collecting(
        IN_PROCESS, entry, IS_INIT[name], frames=T * count, max_frames_per_traj=cut
    ) as collector:
        last = None
        for _ in range(3):
            td = collector.next()
            assert td["is_init"].shape == (*td.shape, 1)
            assert torch.equal(td["action"], td["is_init"].squeeze(-1).long())
            ids = td["collector", "traj_ids"].view(count, T)
            before = torch.full((count, 1), -1) if last is None else last
            begins = torch.cat([before, ids], 1).diff() != 0
            assert torch.equal(td["is_init"].view(count, T), begins)
            last = ids[:, -1:]


def test_is_init_is_recorded_only_if_it_is_read() -> None:
    policy, _ = seeded("GRUCell")
    with collecting(IN_PROCESS, one, policy, frames=T) as collector:
        assert collector.next().get("is_init", None) is None

"""Policies that read the collector's entries: flags and step count of the current state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from collect_support import CAT_0, IN_PROCESS, MULTI_0, STEPS, Way, collecting, marked
from echo_envs import ENTRIES, echo_fns, envs_of
from raising import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

FLAGS = ("done", "terminated", "truncated")


def by_flags(*flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seen = torch.cat(flags, -1)
    return (~seen.any(-1)).long(), seen


def by_count(count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (count % 2).squeeze(-1), count.clone()


def over_tensordict(act: Callable[..., Any], *keys: str) -> Callable[[TensorDict], TensorDict]:
    def policy(td: TensorDict) -> TensorDict:
        td["action"], td["seen"] = act(*(td[key] for key in keys))
        return td

    return policy


FORMS: dict[str, Callable[..., Any]] = {
    "module": lambda act, *keys: TensorDictModule(act, list(keys), ["action", "seen"]),
    "callable over a TensorDict": over_tensordict,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["one", "list"])
def test_flags_are_of_the_state_acted_on(form: str, kind: str) -> None:
    policy = FORMS[form](by_flags, *FLAGS)
    frames = STEPS * envs_of(kind)[0]
    with collecting(IN_PROCESS, ENTRIES[kind], policy, frames=frames) as collector:
        for _ in range(3):
            td = collector.next()
            assert td["next", "done"].any()
            assert torch.equal(td["seen"], torch.cat([td[flag] for flag in FLAGS], -1))
            assert td["action"].all()


@pytest.mark.parametrize("way", marked(IN_PROCESS, CAT_0, MULTI_0))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["one", "list"])
def test_step_count_equals_the_batchs(form: str, kind: str, way: Way) -> None:
    policy = FORMS[form](by_count, "step_count")
    frames = STEPS * envs_of(kind)[0]
    with collecting(way, ENTRIES[kind], policy, frames=frames, max_frames_per_traj=2) as collector:
        for _ in range(3):
            td = collector.next()
            assert set(td["step_count"].unique().tolist()) == {0, 1}
            assert torch.equal(td["seen"], td["step_count"])
            assert torch.equal(td["action"], td["step_count"].squeeze(-1))


def test_a_reset_restarts_the_count() -> None:
    policy = FORMS["module"](by_count, "step_count")
    with collecting(
        IN_PROCESS,
        partial(echo_fns, count=2),
        policy,
        frames=2 * 3,
        max_frames_per_traj=50,
        reset_at_each_iter=True,
    ) as collector:
        for _ in range(3):
            td = collector.next()
            assert not td["seen"][:, 0].any()
            assert torch.equal(td["seen"], td["step_count"])


@pytest.mark.parametrize(("key", "limit"), [("step_count", None), (("collector", "traj_ids"), 5)])
def test_an_unavailable_entry_is_named(key: Any, limit: int | None) -> None:
    """Steps are counted only with a limit, and ids are assigned on delivery."""
    policy = TensorDictModule(by_count, [key], ["action", "seen"])
    with (
        refused(ValueError, "policy") as caught,
        collecting(IN_PROCESS, ENTRIES["list"], policy, frames=6, max_frames_per_traj=limit),
    ):
        pass
    assert (key if limit is None else key[-1]) in str(caught.value)

"""The programs of examples/real: both sides run, and the comparison finds errors."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
pytest.importorskip("gymnasium")
pytest.importorskip("psutil")

from benchmarks.race import Row
from examples.real import __main__ as command
from examples.real import report
from examples.real.episodes import Comparison, collector_of, compared
from examples.real.programs import PROGRAMS, Program
from examples.real.run import Result
from examples.real.sides import ALONE, sides_of

CARTPOLES = replace(PROGRAMS["cartpoles"], steps=60, episodes=8)


def batches(program: Program) -> list[Any]:
    with collector_of(program, 2) as collector:
        return list(collector)


@pytest.mark.parametrize("name", ["cartpole", "cartpoles"])
def test_episodes_equal_the_environments_statistics(name: str) -> None:
    found = compared(replace(PROGRAMS[name], episodes=8))
    assert found.episodes >= 8
    assert found.wrong == []


def add_to_reward(last: Any) -> None:
    last["next", "reward"] += 1


def change_terminal_observation(last: Any) -> None:
    last["next", "observation"][0] += 1e-6


def put_into_another_trajectory(last: Any) -> None:
    last["collector", "traj_ids"] += 10_000


@pytest.mark.parametrize(
    "spoil", [add_to_reward, change_terminal_observation, put_into_another_trajectory]
)
def test_a_fault_in_one_frame_is_found(spoil: Any) -> None:
    found, spoilt = Comparison(), Comparison()
    first, second = batches(CARTPOLES)
    for batch in (first, second):
        found.add(batch)
    assert found.wrong == []
    row, time = torch.nonzero(second["next", "done"][..., 0])[0].tolist()
    spoil(second[row, time])
    for batch in (first, second):
        spoilt.add(batch)
    assert spoilt.episodes == found.episodes
    assert len(spoilt.wrong) == 1


def test_too_few_episodes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.real.episodes._MOST_BATCHES", 1)
    with pytest.raises(RuntimeError, match="5000"):
        compared(replace(CARTPOLES, episodes=5000))


def test_sides_with_missing_packages_are_skipped_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("examples.real.sides.find_spec", lambda name: None)
    sides, why_not = sides_of("cartpole")
    assert [side.name for side in sides] == ["pycollect", "plain loop", ALONE]
    assert why_not["TorchRL"] == "torchrl is not installed"
    nothing = Result("cartpole", 1, (), (), why_not, (0.0, 0.0))
    assert "TorchRL is left out: torchrl is not installed" in report.section(nothing, figures=False)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main(["--only", "half-cheetah"]) == 0
    assert "skipped, not installed: mujoco, torchrl" in capsys.readouterr().out


def test_a_page_has_the_maximum_possible_speedup() -> None:
    figures: dict[str, Any] = dict.fromkeys((own.name for own in fields(Row)), 1.0)
    rows = tuple(
        Row(**{**figures, "case": "CartPole", "side": side, "rates": (1.0,), "cpu_ratio": ratio})
        for side, ratio in (("pycollect", 1.0), (ALONE, 0.5), ("TorchRL", 3.0))
    )
    said = "Environment and network alone reach 6 times the rate of TorchRL."
    assert said in report.section(Result("cartpole", 1, (), rows, {}, (0.5, 1.0)))
    assert said not in report.section(Result("cartpole", 1, (), rows[:2], {}, (0.5, 1.0)))


def test_results_are_kept_by_program(tmp_path: Path) -> None:
    figures: dict[str, Any] = dict.fromkeys((own.name for own in fields(Row)), 1.0)
    row = Row(**{**figures, "case": "CartPole", "side": "pycollect", "rates": (1.0,)})
    for episodes, wrong in ((1, ()), (7, ("trajectory 3: ...",))):
        result = Result("cartpole", episodes, wrong, (row,), {}, (0.5, 1.0))
        report.keep(tmp_path, result, "the command")
    page = (tmp_path / "real.md").read_text()
    assert page.count("## CartPole") == 1
    assert "Episodes compared: 7, 1 WRONG: trajectory 3" in page
    assert "`the command`" in page

"""The programs in examples/ run unmodified."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.ray
def test_ppo_learns(capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("gymnasium")
    program = runpy.run_path(str(EXAMPLES / "ppo.py"))
    assert program["main"](total_frames=40_000) > 60
    assert not [warning for warning in recwarn if "create_env_fn" in str(warning.message)]
    assert "episodes" in capsys.readouterr().out


@pytest.mark.slow
def test_mujoco_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("gymnasium", "mujoco", "torchrl"):
        pytest.importorskip(needed)
    # As TorchRL's import sets it; an earlier test may have restored it.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    assert runpy.run_path(str(EXAMPLES / "ppo_mujoco.py"))["main"](total_frames=20_000) > 50


@pytest.mark.slow
@pytest.mark.processes
def test_sac_learns_and_holds_its_ratio() -> None:
    pytest.importorskip("gymnasium")
    episode_return, frames = runpy.run_path(str(EXAMPLES / "sac.py"))["main"]()
    assert episode_return > -250
    assert 6_000 <= frames <= 6_020  # 1,000 plus one per update, in batches of 20


def test_the_guide_shows_the_sac_program() -> None:
    guide = (EXAMPLES.parent / "docs" / "guides" / "replay-buffers.md").read_text()
    program = (EXAMPLES / "sac.py").read_text()
    assert program[program.index("import copy") :] in guide


@pytest.mark.slow
@pytest.mark.ray
def test_ppo_by_the_scheme_reaches_475(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("gymnasium")
    program = runpy.run_path(str(EXAMPLES / "scheme.py"))
    assert program["main"]() >= 475
    assert "policy lag 0" in capsys.readouterr().out


def test_the_readme_lists_every_program() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"`{path.name}`" in text for path in EXAMPLES.glob("*.[ip]*"))


def test_no_program_hides_a_package() -> None:
    """Check it because Python searches the folder of a script before the installed packages."""
    found = [find_spec(path.stem) for path in EXAMPLES.glob("*.py")]
    assert not [spec.name for spec in found if spec and spec.origin]  # the tests' folders have none

"""scripts/set_up.py runs each step once, and repeats a step if its inputs changed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/set_up.py"

# Stands for pip: records each call and installs a distribution with one module.
INSTALL = """import site
from pathlib import Path
ran = Path("ran")
ran.write_text(ran.read_text() + "x" if ran.exists() else "x")
packages = Path(site.getsitepackages()[0])
(packages / "core.so").touch()
info = packages / "own-1.0.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text("Name: own\\nVersion: 1.0\\n")
(info / "RECORD").write_text("core.so,,\\n")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A copy of the script in a checkout folder of its own."""
    spec = importlib.util.spec_from_file_location("set_up", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv/stamp.json")
    monkeypatch.setattr(module, "INSTALL", ["-c", INSTALL])
    (tmp_path / "csrc/src").mkdir(parents=True)
    (tmp_path / "csrc/src/one.cpp").write_text("int one;")
    return module


def found(name: str, root: Path) -> Path:
    (path,) = root.glob(f".venv/lib/python*/site-packages/{name}")
    return path


def uninstall(root: Path) -> None:
    for path in found("own-1.0.dist-info", root).iterdir():
        path.unlink()
    found("own-1.0.dist-info", root).rmdir()


CHANGES: list[Callable[[Path], object]] = [
    lambda root: (root / "csrc/src/one.cpp").write_text("int two;"),
    lambda root: (root / "csrc/src/two.cpp").touch(),
    lambda root: (root / "constraints.txt").write_text("torch==1\n"),
    lambda root: found("core.so", root).unlink(),
    uninstall,
]


@pytest.mark.slow
def test_set_up_installs_again_only_after_a_change(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times() -> int:
        assert script.main() == 0
        return len((tmp_path / "ran").read_text())

    assert (times(), times()) == (1, 1)
    (tmp_path / "README.md").write_text("new")
    found("own-1.0.dist-info", tmp_path).parent.joinpath("other-1.0.dist-info").mkdir()
    assert times() == 1  # neither is an input of the installation
    for count, change in enumerate(CHANGES, 2):
        change(tmp_path)
        assert (times(), times()) == (count, count)
    monkeypatch.setenv("CXX", "another")
    assert times() == len(CHANGES) + 2


@pytest.mark.slow
def test_a_failed_install_is_repeated(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "INSTALL", ["-c", "raise SystemExit(3)"])
    assert (script.main(), script.main()) == (3, 3)


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--extra", 2), ("here", 2)])
def test_set_up_has_no_arguments(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, code: int
) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main([argument])
    assert ended.value.code == code
    assert "usage: " in "".join(capsys.readouterr())
    assert not (tmp_path / ".venv").exists()

"""`python -m pycollect`: its help, version, examples, and the measurements of `bench cpu`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import pycollect
from pycollect.__main__ import _parser, main

COMMANDS = ([], ["demo"], ["bench"], ["bench", "cpu"], ["bench", "gpu"])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["bench"], ["demo", "-h"]])
def test_help_imports_no_library(arguments: list[str]) -> None:
    loud = "import sys, atexit; atexit.register(lambda: print(*sys.modules))"
    code = f"{loud}; from pycollect.__main__ import main; sys.exit(main({arguments}))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    imported = set(result.stdout.splitlines()[-1].split())
    assert "argparse" in imported
    assert imported.isdisjoint(("torch", "tensordict", "gymnasium", "numpy", "ray", "torchrl"))


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{pycollect.__version__}\n"


VERSION, CHECK = ["--version"], ["check", "CartPole-v1", "--seconds", "0.1"]
SLOW = pytest.param(CHECK, "1", marks=pytest.mark.slow)  # imports torch, as the one before


@pytest.mark.parametrize(
    ("command", "unbuffered"), [(VERSION, ""), (VERSION, "1"), (CHECK, ""), SLOW]
)
def test_a_reader_that_leaves_ends_the_command_without_a_traceback(
    command: list[str], unbuffered: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "pycollect", *command],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        timeout=120,
    )
    os.close(writer)
    assert result.returncode == 141
    assert "Traceback" not in result.stderr
    assert "ignored" not in result.stderr


@pytest.mark.parametrize("command", [[], ["bench"]])
def test_without_a_command_help_is_printed(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("usage: python -m pycollect")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_unknown_option_shows_the_usage_of_its_command(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--unknown"])
    text = capsys.readouterr().err
    assert text.startswith(f"usage: {' '.join(['python -m pycollect', *command])} [-h]")
    assert text.endswith("unrecognized arguments: --unknown\n")


@pytest.mark.parametrize("command", [*COMMANDS, ["check"]], ids=" ".join)
def test_examples_in_the_help_are_valid(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    lines = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    examples = [line.strip() for line in lines if line.startswith("  python -m pycollect")]
    assert examples
    for example in examples:
        words = shlex.split(example, comments=True)
        args = _parser().parse_args(words[3:])
        assert words[3 : 3 + len(command)] == command or not command
        assert callable(args.run)


@pytest.mark.slow
@pytest.mark.processes
def test_without_a_gpu_collectors_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["bench", "cpu", "--quick", "--workers", "1", "--json", str(figures)]
    assert main(arguments) == 0
    rows = {row["name"]: row for row in json.loads(figures.read_text())["rows"]}
    for name in ("plain loop", "pycollect, in process", "pycollect, 1 process"):
        assert rows[name]["frames_per_second"] > 0
    assert rows["pycollect, in process"]["ratio"] > 0
    assert rows["pycollect, 1 process, first batch again"]["seconds"] > 0
    assert "plain loop" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--env", "NoSuchEnv-v0"], "--env: "),
        (["--workers", "0"], "--workers: "),
        (["--json", "/dev/null/figures.json"], "--json: "),
    ],
)
def test_unsupported_measurements_are_named(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "cpu", *arguments])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err

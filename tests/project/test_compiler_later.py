"""Workers import tensordict without torch's compiler; its marks are applied on a later import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MARKED = """
import json, sys
{first}
import tensordict, tensordict.nn, tensordict.utils
before = "torch._dynamo" in sys.modules
import torch, torch._dynamo
from torch._dynamo.trace_rules import _allowed_callable_ids
constant = [name for name, own in vars(tensordict.utils).items()
            if getattr(own, "_dynamo_marked_constant", False)]
allowed = _allowed_callable_ids.function_ids or set()
named = [own for own in (torch._C._functorch._add_batch_dim, torch._C._functorch._remove_batch_dim,
                         torch._foreach_copy_) if id(own) in allowed]
mark = torch.compiler.allow_in_graph.__module__
print(json.dumps([before, constant, len(named), len(allowed), mark]))
"""


SHOWN = """
import sys
import gymnasium, numpy as np

class Showing(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        there = np.full(1, "torch._dynamo" in sys.modules, np.float32)
        return there, 0.0, False, False, {}

if __name__ == "__main__":
    import torch
    from tensordict.nn import TensorDictModule
    from pycollect import MultiSyncDataCollector

    policy = TensorDictModule(torch.nn.Linear(1, 1), in_keys=["observation"], out_keys=["action"])
    compiled = {"backend": "eager"} if sys.argv[1] == "compiled" else None
    method = "forkserver" if compiled else sys.argv[1]
    with MultiSyncDataCollector(
        [Showing], policy, frames_per_batch=8, start_method=method, compile_policy=compiled
    ) as collector:
        print(collector.next()["next", "observation"].flatten()[-1].item())
"""


def said_by(*arguments: str | Path) -> str:
    """Run Python with these arguments, check that it succeeds, and return its output."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(first: str) -> Any:
    """Return the marks that a program prints if it starts with this code."""
    return json.loads(said_by("-c", MARKED.format(first=first)).splitlines()[-1])


@pytest.mark.slow
def test_all_marks_are_made_when_the_compiler_is_imported() -> None:
    alone = found("")
    # `find_spec` does not import the module.
    late = found("import pycollect, importlib.util as u; assert u.find_spec('tensordict')")
    assert alone[0], "tensordict no longer imports the compiler, and this is of no use"
    assert not late[0]
    assert late[1:] == alone[1:]
    assert late[1], "nothing was marked as constant"
    assert late[2], "nothing was marked as allowed"


FAILING = """
import importlib, sys
import pycollect
importlib.reload(pycollect)

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

def fails(name, within):
    finder = Interrupts()
    finder.name = within
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        return
    raise AssertionError("the import succeeded")

fails("tensordict", "tensordict._lazy")
import tensordict.utils
assert "torch._dynamo" not in sys.modules
fails("torch._dynamo", "torch._dynamo.convert_frame")
import torch._dynamo
assert tensordict.utils._check_inbuild._dynamo_marked_constant
assert not [own for own in sys.meta_path if type(own).__module__ == "pycollect.compiler_later"]
"""


@pytest.mark.slow
def test_an_import_that_fails_is_tried_again() -> None:
    said_by("-c", FAILING)


@pytest.mark.parametrize(
    "methods",
    [
        ["forkserver"],
        *(pytest.param([own], marks=pytest.mark.slow) for own in ("compiled", "spawn")),
    ],
)
def test_workers_import_the_compiler_only_to_compile(methods: list[str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHOWN)
    told = said_by(program, *methods).split()
    assert told == ["1.0" if method == "compiled" else "0.0" for method in methods]

"""Run every block of Python in docs/ as its page shows it.

The blocks of a page form one program. A comment in front of a block makes it a separate program, or
only compiles it:

    <!-- needs mujoco -->         skip if it cannot be imported; "needs A and B" for two
    <!-- needs wandb, in a process of its own -->    likewise, if it leaves threads behind
    <!-- with ray -->             on the tests' local Ray cluster
    <!-- only compiled: why -->   check the syntax; the tests lack a dependency

test_readme.py runs the README's block, and test_docs.py runs the blocks of coming-from-torchrl.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributions import Distribution

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>[^\n]*) -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S
)
COMMENT = re.compile(
    r"needs (?P<modules>\w+(?: and \w+)?)(?P<alone>, in a process of its own)?"
    r"|(?P<ray>with ray)|(?P<only>only compiled: .+)"
)
RUN_ELSEWHERE = ["coming-from-torchrl.md"]


def programs() -> Iterator[Any]:
    """Yield each page's blocks, the modules they need, and the source of a separate program."""
    for path in sorted(DOCS.rglob("*.md")):
        page = str(path.relative_to(DOCS))
        together = []
        for number, block in enumerate(BLOCK.finditer(path.read_text())):
            compiled = compile(block["code"], f"{page}, block {number + 1}", "exec")
            comment = block["comment"] and COMMENT.fullmatch(block["comment"])
            assert comment or not block["comment"], f"{page}: {block['comment']!r} is not known"
            if not comment:
                together.append(compiled)
            elif not comment["only"]:
                marks = [pytest.mark.ray] if comment["ray"] else []
                alone = block["code"] if comment["alone"] else None
                name = f"{page}, {block['comment']}, {number + 1}"
                yield pytest.param([compiled], comment["modules"], alone, id=name, marks=marks)
        if together and page not in RUN_ELSEWHERE:
            yield pytest.param(together, None, None, id=page)


@pytest.mark.parametrize(("blocks", "modules", "alone"), list(programs()))
def test_python_block_runs(
    blocks: list[Any],
    modules: str | None,
    alone: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in modules.split(" and ") if modules else ():
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    # Match the state after TorchRL's first import: its TanhNormal fails torch's validation.
    monkeypatch.setattr(Distribution, "_validate_args", False)
    if alone is not None:
        subprocess.run([sys.executable, "-c", alone], check=True, timeout=300)
        return
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        exec(block, names)

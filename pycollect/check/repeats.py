"""The same seed and the same actions give the same results."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from pycollect.check.calls import Budget
from pycollect.check.report import WARNING, Draft
from pycollect.check.single import Subject
from pycollect.check.values import is_close, is_equal
from pycollect.check.walk import Walk, take


def check_same_seed(subject: Subject) -> None:
    """The same seed and the same actions give the same results, in this and in a new instance."""
    if subject.seed is None or getattr(subject.env.spec, "nondeterministic", False):
        return
    steps = len(subject.walk.actions)
    for name, env in (("the same instance", subject.env), ("a new instance", subject.second)):
        if env is not None:
            budget, before = Budget(subject.seconds / 2), global_generators()
            walk = take(env, subject.actions, subject.seed, steps, budget)
            compare(subject.report, (subject.walk, walk), name, before)


def compare(report: Draft, walks: tuple[Walk, Walk], name: str, before: dict[str, Any]) -> None:
    """Report the first result of the second walk that differs from the first walk's.

    Args:
        name: The instance of the second walk, for the message.
        before: `global_generators` before the second walk.
    """
    pairs = list(zip(walks[0].kept, walks[1].kept, strict=False))
    different = next((i for i, (a, b) in enumerate(pairs) if not is_close(a, b)), None)
    if different is None:
        if not all(is_equal(a, b) for a, b in pairs):
            report.add(
                "non-deterministic",
                f"the same seed and actions gave slightly different values in {name}",
                WARNING,
            )
        return
    drawn = [own for own, state in global_generators().items() if before[own] != state]
    why = f" It draws from the global generator {' and '.join(drawn)}." if drawn else ""
    if different == 0:
        text = f"reset() with the same seed returned another observation in {name}.{why}"
        report.add("ignored-seed", text)
        return
    names = ("observation", "reward", "terminated", "truncated")
    parts = zip(names, *pairs[different], strict=False)
    part = next((one for one, a, b in parts if not is_close(a, b)), "kind of result")
    report.add(
        "non-deterministic",
        f"after a reset with the same seed, and with the same actions, call {different} of step or "
        f"reset returned another {part} in {name}.{why}",
    )


def global_generators() -> dict[str, Any]:
    """Return hashes of the states of the global random generators."""
    own = np.random.get_state()
    return {
        "np.random": (own[1].tobytes(), own[2]) if isinstance(own, tuple) else own,
        "random": hash(random.getstate()),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }

"""Findings about an environment, their codes, and the report that collects them."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from dataclasses import dataclass, field

FIXES = {
    "action-space": "Accept every action of action_space, or make the space smaller.",
    "autoreset-mode": "Set metadata['autoreset_mode'] to the mode in which the environment resets.",
    "changed-later": "Return a copy: observation.copy().",
    "crashes": "Correct the line, or end the episode instead of raising.",
    "differs-in-worker": "Use nothing that differs between processes, such as the time or hash().",
    "final-observation": "Return the last observation of each episode in info['final_obs'].",
    "flag-type": "Return bool(terminated), bool(truncated).",
    "growing-info": "Put only values of this step into info, and clear lists in reset().",
    "gymnasium": "See gymnasium.utils.env_checker.check_env.",
    "hangs": "Return from every call; raise an exception if the simulator does not answer.",
    "ignored-seed": "Call super().reset(seed=seed) in reset(), draw all random numbers from "
    "self.np_random, accept the seed 0, and read nothing that the last episode left.",
    "interface": "Return (observation, info) from reset() and (observation, reward, terminated, "
    "truncated, info) from step().",
    "leaves-process": "End every process in close(), and wait for its end.",
    "merged-flags": "Return terminated=True only for an end of the task, and truncated=True only "
    "for a time limit.",
    "no-end": "Pass max_frames_per_traj to the collector, or use gymnasium.wrappers.TimeLimit.",
    "non-deterministic": "Draw all random numbers from self.np_random, and let reset() set every "
    "attribute that step() changes.",
    "not-finite": "Find the division, root or overflow that makes the value.",
    "not-picklable": "Create it in the environment's __init__ or reset(), so that each worker has "
    "its own.",
    "observation-bounds": "Clip the observation, or widen low and high of the space.",
    "observation-dtype": "Return observation.astype(observation_space.dtype), or change the dtype "
    "of the space.",
    "observation-shape": "Return an observation of the space's shape, or change the shape of the "
    "space.",
    "observation-space": "Return a value that observation_space.contains(), or change the space.",
    "refused": "See the message.",
    "reset-mask": "Reset only the rows of options['reset_mask'], and keep the others.",
    "reused-buffer": "Return a copy: self._buffer.copy().",
    "reward-type": "Return float(reward); for a vector of rewards, set reward_space to a Box [k].",
    "same-instance": "Create a new environment in each call of the factory.",
    "same-rows": "Give each row its own state and its own random generator.",
    "shared-object": "Return new arrays and dicts in each call.",
    "slow-reset": "Load files and start programs in __init__, not in each reset().",
    "slow-steps": "Use an asynchronous collector, which does not wait for the slowest environment.",
    "specs": "Correct the specs, or the entries that the environment returns.",
    "starts-process": "Start processes and threads in __init__, and keep them until close().",
    "step-before-reset": "Raise gymnasium.error.ResetNeeded, or use gymnasium.make, which does.",
    "warned": "See the warning.",
}
"""Codes of findings, and the correction of each."""

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Finding:
    """One fault of an environment.

    Attributes:
        code: Short name of the kind of fault, a key of `FIXES`.
        severity: "error", or "warning" for a finding that may be intended.
        message: Behavior of the environment, and the call.
        fix: The correction.
    """

    code: str
    severity: str
    message: str
    fix: str

    def __str__(self) -> str:
        head = f"{self.severity}: {self.code}: {self.message}"
        return f"{_wrapped(head, '  ')}\n{_wrapped('fix: ' + self.fix, '    ')}"


@dataclass
class Report:
    """Result of `check_env`. ``print(report)`` shows all of it.

    Attributes:
        env: Name of the environment.
        findings: Errors, then warnings.
        facts: Measurements by name, such as the time per step.
        skipped: Checks that could not run, and why.
    """

    env: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all findings are warnings."""
        return not self.errors

    @property
    def errors(self) -> list[Finding]:
        """The findings with severity "error"."""
        return [finding for finding in self.findings if finding.severity == ERROR]

    @property
    def warnings(self) -> list[Finding]:
        """The findings with severity "warning"."""
        return [finding for finding in self.findings if finding.severity == WARNING]

    def __str__(self) -> str:
        counts = [
            f"{len(found)} {name}{'s' if len(found) > 1 else ''}"
            for name, found in ((ERROR, self.errors), (WARNING, self.warnings))
            if found
        ]
        lines = [f"{self.env}: {', '.join(counts) or 'nothing is wrong'}"]
        lines += map(str, self.findings)
        lines += [f"  {name}: {value}" for name, value in self.facts.items()]
        lines += [_wrapped(f"not checked: {text}", "  ") for text in self.skipped]
        return "\n".join(lines)


@dataclass
class Draft(Report):
    """A report to which checks add."""

    ignored: Collection[str] = ()  # codes of findings that are left out
    places: set[str] = field(default_factory=set)  # lines of the environment named in findings
    frames: int = 50  # of each environment in a collected batch; fewer if its steps are slow
    has_mask: bool = False  # whether it returns an action mask, which random actions ignore
    _found: dict[tuple[str, str], Finding] = field(default_factory=dict)

    def final(self) -> Report:
        return Report(self.env, self.findings, self.facts, self.skipped)

    def has(self, *codes: str) -> bool:
        """Return whether a code, or a prefix that ends with "-", was found, even if ignored."""
        return any(
            found == code or (code.endswith("-") and found.startswith(code))
            for found, _ in self._found
            for code in codes
        )

    def add(
        self, code: str, message: str, severity: str = ERROR, fix: str = "", about: str = ""
    ) -> None:
        """Add a finding, or let it replace a warning with the same code about the same object.

        If an error with that code and object is known, nothing is added. `fix` defaults to the
        code's own; the object `about` is for example the key of an observation.
        """
        known = self._found.get((code, about))
        if known is not None and (known.severity == ERROR or severity == WARNING):
            return
        found = Finding(code, severity, message, fix or FIXES[code])
        self._found[code, about] = found
        if code in self.ignored:
            return
        self.findings = [finding for finding in self.findings if finding is not known] + [found]
        self.findings.sort(key=lambda finding: finding.severity)

    def skip(self, check: str, reason: str) -> None:
        """Note once that a check could not run."""
        text = f"{check}: {reason}"
        if text not in self.skipped:
            self.skipped.append(text)

    def note_end(self, place: str = "") -> None:
        """Note that an error at this line ended a check, unless a listed error shows it."""
        if self.ok and self.ignored:
            at = f" at {place}" if place else ""
            self.skip("the rest of a check", f"an ignored error{at} ended it")


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        100,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )

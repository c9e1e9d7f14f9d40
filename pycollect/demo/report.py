"""The summary of a demo run: its outcome, its times and its figures."""

from __future__ import annotations

from pycollect.demo.train import RECENT_EPISODES, Run

PHASES = {
    "start": "starting workers",
    "collect": "collecting",
    "learn": "learning",
    "push weights": "pushing weights",
    "stop": "stopping",
}
"""Phases of a run's clock, in the order of the summary."""

PARTS = {
    "idle": "waiting for workers",
    "env": "environments",
    "policy": "policy",
    "record": "recording",
    "transport": "transport",
    "assemble": "assembly",
    "deliver": "delivery",
}
"""Parts of collecting, by their names in `stats()["seconds"]`."""


def summary(run: Run) -> str:
    """Return the outcome, a table of times and the figures, as plain text."""
    lines = [_verdict(run), "", *_times(run), "", *_figures(run)]
    return "\n".join(lines)


def _verdict(run: Run) -> str:
    target = run.task.target
    if run.outcome == "interrupted":
        return "Interrupted."
    if run.outcome == "target":
        return f"Solved: the mean return passed {target:g}."
    if target is None:
        return "The frame budget is used up."
    return f"The frame budget is used up, but the mean return did not pass {target:g}."


def _times(run: Run) -> list[str]:
    seconds = run.clock.seconds
    trained = run.points[-1].seconds if run.points else 0.0
    rows = [(label, seconds[name]) for name, label in PHASES.items() if name in seconds]
    inside = sum(seconds.get(name, 0.0) for name in ("collect", "learn", "push weights"))
    rows.append(("everything else", max(0.0, trained - inside)))
    total = sum(value for _, value in rows)
    lines = [f"{'where the time went':<24}{'seconds':>10}{'share':>9}"]
    for label, value in rows:
        lines.append(_time_row(label, value, total))
        if label == PHASES["collect"]:
            lines += [_time_row(f"  {name}", part, total) for name, part in _parts(run)]
    return [*lines, _time_row("total", total, total)]


def _time_row(label: str, seconds: float, total: float) -> str:
    return f"{label:<24}{seconds:>10.2f}{seconds / total if total else 0.0:>9.1%}"


def _parts(run: Run) -> list[tuple[str, float]]:
    """Return the collector's times in this process."""
    seconds = run.stats.get("seconds", {})
    return [(label, seconds[name]) for name, label in PARTS.items() if name in seconds]


def _worked(run: Run) -> float:
    """Return the seconds that all workers together spent on steps."""
    own = [worker["seconds"] for worker in run.stats.get("workers", {}).values()]
    return sum(float(seconds[name]) for seconds in own for name in ("env", "policy", "record"))


def _figures(run: Run) -> list[str]:
    stats = run.stats
    frames, episodes = stats.get("frames", 0), stats.get("episodes", 0)
    trained = run.points[-1].seconds if run.points else 0.0
    collected = run.clock.seconds.get("collect", 0.0)
    mean = stats.get("episode_return")
    last = f"of the last {min(episodes, RECENT_EPISODES)} episodes"
    rows = {
        "frames": f"{frames:,}",
        "frames/s": _rate(frames, trained),
        "  while collecting": _rate(frames, collected),
        "  of each worker": _rate(frames, _worked(run)),
        "episodes": f"{episodes:,}",
        "mean return": "-" if mean is None else f"{mean:.1f} {last}",
    }
    return [row(label, value) for label, value in rows.items()]


def _rate(frames: int, seconds: float) -> str:
    return f"{frames / seconds:,.0f}" if seconds else "-"


def row(label: str, value: str) -> str:
    """Return one line of the summary's figures."""
    return f"{label:<24}{value}"

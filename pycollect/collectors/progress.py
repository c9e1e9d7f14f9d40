"""The progress bar, by tqdm."""

from __future__ import annotations

from tqdm.auto import tqdm


class Progress:
    """A bar of delivered frames with the episode return and the policy's lag beside it."""

    def __init__(self, total_frames: int | None) -> None:
        self._bar = tqdm(total=total_frames, unit="frames", unit_scale=True, dynamic_ncols=True)

    def update(self, frames: int, episode_return: float | None, lag: int) -> None:
        """So many frames more."""
        postfix = {} if episode_return is None else {"return": f"{episode_return:.1f}"}
        self._bar.set_postfix({**postfix, "lag": lag}, refresh=False)
        self._bar.update(frames)

    def close(self) -> None:
        """Leave the bar as it stands. Idempotent."""
        self._bar.close()

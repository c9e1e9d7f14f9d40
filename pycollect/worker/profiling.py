"""What workers do, by torch's profiler: a hook behind each of their first rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from pycollect.worker.hooks import PostHook


@dataclass(frozen=True)
class ProfileConfig:
    """What is profiled, and where the trace goes.

    Attributes:
        workers: whose rollouts; of a collector in this process that is worker 0.
        num_rollouts: after how many rollouts of a worker it ends.
        warmup_rollouts: how many of these are left out at first.
        save_path: of the trace, with "{worker_idx}" for the worker's id; None:
            ./collector_profile_{worker_idx}.json.
        activities: "cpu" and "cuda", of which the latter is left out where there is no CUDA.
        record_shapes, profile_memory, with_stack, with_flops: torch's.
        on_trace_ready: called with the profiler, instead of saving the trace.
    """

    workers: Sequence[int] = (0,)
    num_rollouts: int = 3
    warmup_rollouts: int = 1
    save_path: str | Path | None = None
    activities: Sequence[str] = ("cpu", "cuda")
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = True
    with_flops: bool = False
    on_trace_ready: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.num_rollouts <= self.warmup_rollouts:
            raise ValueError(
                f"num_rollouts: expected more than warmup_rollouts ({self.warmup_rollouts}), got "
                f"{self.num_rollouts}"
            )
        if self.warmup_rollouts < 0:
            raise ValueError(f"warmup_rollouts: expected an int >= 0, got {self.warmup_rollouts}")
        unknown = sorted({name.lower() for name in self.activities} - {"cpu", "cuda"})
        if unknown:
            raise ValueError(f"activities: expected 'cpu' and 'cuda', got {unknown}")

    def get_save_path(self, worker_idx: int) -> Path:
        """Where a worker's trace goes.

        Args:
            worker_idx: its id.

        Returns:
            `save_path` with the id in its place.
        """
        if self.save_path is None:
            return Path(f"./collector_profile_{worker_idx}.json")
        return Path(str(self.save_path).format(worker_idx=worker_idx))

    def should_profile_worker(self, worker_idx: int) -> bool:
        """Whether a worker is among `workers`.

        Args:
            worker_idx: its id.

        Returns:
            True where its rollouts are profiled.
        """
        return worker_idx in self.workers

    def get_activities(self) -> list[torch.profiler.ProfilerActivity]:
        """The activities that are named and that there are here.

        Returns:
            torch's names of them.
        """
        known = {"cpu": torch.profiler.ProfilerActivity.CPU}
        if torch.cuda.is_available():
            known["cuda"] = torch.profiler.ProfilerActivity.CUDA
        return [known[name.lower()] for name in self.activities if name.lower() in known]


class ProfilerHook:
    """A `post_collect_hook` that drives torch's profiler from one rollout to the next.

    It pickles; the profiler is made where it is first called.

    Args:
        worker: the worker's id.
        inner: the hook in whose place it is, which it calls.
    """

    def __init__(self, config: ProfileConfig, worker: int, inner: PostHook | None) -> None:
        self._config, self._worker, self.inner = config, worker, inner
        self._profiler: Any = None
        self._rollouts = 0
        self._over = not config.get_activities()

    def __call__(self, td: TensorDictBase) -> None:
        """A rollout is there."""
        if self.inner is not None:
            self.inner(td)
        if self._over:
            return
        if self._profiler is None:
            self._profiler = self._made()
            self._profiler.start()
        self._profiler.step()
        self._rollouts += 1
        if self._rollouts >= self._config.num_rollouts:
            self.stop()

    def stop(self) -> None:
        """End the profiler, which hands over its trace. Idempotent."""
        if not self._over:
            self._over = True
            if self._profiler is not None:
                self._profiler.stop()

    def _made(self) -> Any:
        config = self._config
        return torch.profiler.profile(
            activities=config.get_activities(),
            schedule=torch.profiler.schedule(
                skip_first=config.warmup_rollouts,
                wait=0,
                warmup=0,
                active=config.num_rollouts - config.warmup_rollouts,
                repeat=1,
            ),
            on_trace_ready=config.on_trace_ready or self._save,
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
        )

    def _save(self, profiler: Any) -> None:
        path = self._config.get_save_path(self._worker)
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))


class Profiled(ABC):
    """`enable_profile` and what belongs to it."""

    _profile_config: ProfileConfig | None = None

    @property
    def profile_config(self) -> ProfileConfig | None:
        """What is profiled; None: nothing."""
        return self._profile_config

    def enable_profile(
        self,
        *,
        workers: Sequence[int] | None = None,
        num_rollouts: int = 3,
        warmup_rollouts: int = 1,
        save_path: str | Path | None = None,
        activities: Sequence[str] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = False,
        with_stack: bool = True,
        with_flops: bool = False,
        on_trace_ready: Callable[[Any], Any] | None = None,
    ) -> None:
        """Profile the first rollouts of some workers, where they collect.

        It is done by a `post_collect_hook`, which calls the one that was there.

        Args:
            workers: their ids; None: the first one. Ids of no worker are without effect.
            num_rollouts: after how many rollouts of a worker it ends.
            warmup_rollouts: how many of these are left out at first.
            save_path: of the trace, with "{worker_idx}" for the worker's id; None:
                ./collector_profile_{worker_idx}.json.
            activities: "cpu" and "cuda"; None: what there is.
            record_shapes, profile_memory, with_stack, with_flops: of ``torch.profiler.profile``.
            on_trace_ready: called with the profiler, instead of saving the trace.

        Raises:
            RuntimeError: batches were asked for already.
            ValueError: not more rollouts than are left out.
        """
        if self._has_begun:
            raise RuntimeError(
                "Cannot enable profiling after iteration has started; call enable_profile() before"
            )
        config = ProfileConfig(
            workers=(0,) if workers is None else tuple(workers),
            num_rollouts=num_rollouts,
            warmup_rollouts=warmup_rollouts,
            save_path=save_path,
            activities=("cpu", "cuda") if activities is None else tuple(activities),
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            on_trace_ready=on_trace_ready,
        )
        self._begin_profile(config)
        self._profile_config = config

    def disable_profile(self) -> None:
        """End it, and call the hook alone again that was there. Nothing happens where it is off."""
        config, self._profile_config = self._profile_config, None
        if config is not None:
            self._end_profile(config)

    @property
    @abstractmethod
    def _has_begun(self) -> bool:
        """Whether batches were asked for."""

    @abstractmethod
    def _begin_profile(self, config: ProfileConfig) -> None:
        """Give the workers their hooks."""

    @abstractmethod
    def _end_profile(self, config: ProfileConfig) -> None:
        """Stop what runs, and give them back the hook that was there."""

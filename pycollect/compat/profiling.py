"""Profile workers with torch's profiler, through a hook after each rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from pycollect import checks as check
from pycollect.arguments import completed_by
from pycollect.driver.flow import Flow
from pycollect.driver.stream import Source
from pycollect.worker.options import POST, PostHook


@dataclass(frozen=True)
class ProfileConfig:
    """Settings of a profile.

    Args:
        workers: Ids of the workers to profile. An in-process collector is worker 0 (default: (0,)).
        num_rollouts: Number of rollouts of a worker after which its profile ends (default: 3).
        warmup_rollouts: Number of first rollouts that are not recorded (default: 1).
        save_path: File of the trace; "{worker_idx}" is replaced by the worker's id. ``None`` means
            ./collector_profile_{worker_idx}.json (default: ``None``).
        activities: "cpu" and "cuda"; the latter is ignored without CUDA (default: both).
        record_shapes: Passed to ``torch.profiler.profile`` (default: ``True``).
        profile_memory: Passed to ``torch.profiler.profile`` (default: ``False``).
        with_stack: Passed to ``torch.profiler.profile`` (default: ``True``).
        with_flops: Passed to ``torch.profiler.profile`` (default: ``False``).
        on_trace_ready: Function that is called with the profiler instead of saving the trace
            (default: ``None``).
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
        _check_sequence("workers", self.workers)
        for worker in self.workers:
            check.check_integer("workers", worker)
        warmup = check.check_not_negative("warmup_rollouts", self.warmup_rollouts)
        if check.check_integer("num_rollouts", self.num_rollouts) <= warmup:
            raise ValueError(
                f"num_rollouts: expected more than warmup_rollouts ({warmup}), got "
                f"{self.num_rollouts}"
            )
        _check_sequence("activities", self.activities)
        for name in self.activities:
            check.check_choice("activities", str(name).lower(), ("cpu", "cuda"))
        if not isinstance(self.save_path, str | Path | None):
            raise TypeError(f"save_path: expected a path or None, got {self.save_path!r}")
        try:
            self.get_save_path(0)
        except (LookupError, ValueError) as error:
            raise ValueError(
                "save_path: expected a path with no other placeholder than '{worker_idx}', got "
                f"{str(self.save_path)!r}"
            ) from error
        check.check_callable("on_trace_ready", self.on_trace_ready)

    def get_save_path(self, worker_idx: int) -> Path:
        """Return the path of a worker's trace.

        Args:
            worker_idx: Id of the worker.

        Returns:
            `save_path` with the worker's id.
        """
        if self.save_path is None:
            return Path(f"./collector_profile_{worker_idx}.json")
        return Path(str(self.save_path).format(worker_idx=worker_idx))

    def should_profile_worker(self, worker_idx: int) -> bool:
        """Return whether a worker is profiled.

        Args:
            worker_idx: Id of the worker.

        Returns:
            ``True`` if `workers` contains the id.
        """
        return worker_idx in self.workers

    def get_activities(self) -> list[torch.profiler.ProfilerActivity]:
        """Return the requested activities that are available here.

        Returns:
            Members of ``torch.profiler.ProfilerActivity``.
        """
        known = {"cpu": torch.profiler.ProfilerActivity.CPU}
        if torch.cuda.is_available():
            known["cuda"] = torch.profiler.ProfilerActivity.CUDA
        return [known[name.lower()] for name in self.activities if name.lower() in known]


def _check_sequence(name: str, value: Any) -> None:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected a list, got {value!r}")


class ProfilerHook:
    """A `post_collect_hook` that advances torch's profiler after each rollout.

    It can be pickled; the profiler is made in the first call.

    Args:
        inner: The hook that it replaces, which it also calls.

    Attributes:
        is_over: Whether the profile has ended.
    """

    def __init__(self, config: ProfileConfig, worker: int, inner: PostHook | None) -> None:
        self._config, self._worker, self.inner = config, worker, inner
        self._profiler: Any = None
        self._rollouts = 0
        self.is_over = not config.get_activities()

    def __call__(self, td: TensorDictBase) -> None:
        """Call the inner hook and advance the profiler."""
        if self.inner is not None:
            self.inner(td)
        if self.is_over:
            return
        if self._profiler is None:
            self._profiler = self._made()
            self._profiler.start()
        self._profiler.step()
        self._rollouts += 1
        if self._rollouts >= self._config.num_rollouts:
            self.close()

    def close(self) -> None:
        """Stop the profiler, which then saves its trace. Idempotent."""
        if not self.is_over:
            self.is_over = True
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


class Profiled:
    """Methods that start and end a profile."""

    post_collect_hook: PostHook | None
    _flow: Flow
    _source: Source
    _profile_config: ProfileConfig | None = None
    _profilers: Sequence[ProfilerHook] = ()

    @property
    def profile_config(self) -> ProfileConfig | None:
        """Settings of the current profile, or ``None``."""
        return self._profile_config

    @completed_by(ProfileConfig)
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
        """Profile the first rollouts of some workers, in their own processes.

        The profiler runs in a `post_collect_hook`, which also calls the user's hook. Setting
        another hook after the first batch ends the profile as `disable_profile` does.

        Args:
            workers: Ids of the workers to profile; unknown ids have no effect. ``None`` means
                worker 0 (default: ``None``).
            ...: See ProfileConfig.
            activities: "cpu" and "cuda"; the latter is ignored without CUDA. ``None`` means both
                (default: ``None``).

        Raises:
            RuntimeError: A batch was already requested.
            TypeError, ValueError: An argument has another type, or `num_rollouts` is not greater
                than `warmup_rollouts`.
        """
        if self._flow.statistics.has_begun:
            raise RuntimeError(
                "Cannot enable profiling after iteration has started; call enable_profile() before"
            )
        config = ProfileConfig(
            workers=(0,) if workers is None else workers,
            num_rollouts=num_rollouts,
            warmup_rollouts=warmup_rollouts,
            save_path=save_path,
            activities=("cpu", "cuda") if activities is None else activities,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            on_trace_ready=on_trace_ready,
        )
        self._flow.moving.check_own_process()
        self._profile_config = config
        self._set_profilers(self.post_collect_hook)

    def _set_profilers(self, hook: PostHook | None) -> None:
        """Let profilers, which call this hook, replace the hooks of the workers to profile."""
        config = self._profile_config
        if config is None:
            return
        ids = [index for index in config.workers if index in self._source.policy_lag]
        self._profilers = [ProfilerHook(config, index, hook) for index in ids]
        for index, profiler in zip(ids, self._profilers, strict=True):
            self._source.set_hook(POST, profiler, [index])

    def _check_no_profile(self) -> None:
        """Raise RuntimeError if a profile in this process is not finished.

        Torch's profiler must be stopped by the thread that started it.
        """
        if not self._source.is_remote and not all(profiler.is_over for profiler in self._profilers):
            raise RuntimeError(
                "start: a background thread cannot run an unfinished profile; finish it first, or "
                "call disable_profile()"
            )

    def disable_profile(self) -> None:
        """End the profile and restore the previous hook; without a profile, do nothing."""
        config, self._profile_config = self._profile_config, None
        if config is None or self._flow.closed:  # shutdown() has stopped the profilers
            return
        present = self._source.policy_lag
        self._source.call(
            _stop_profiler, {index: () for index in config.workers if index in present}
        )
        self._stop_profilers()
        self._source.set_hook(POST, self.post_collect_hook)

    def _stop_profilers(self) -> None:
        """Stop the profilers that run in this process."""
        for profiler in self._profilers:
            profiler.close()


def _stop_profiler(worker: Any) -> None:
    """Stop the profiler of a worker in another process. This runs there."""
    hook = getattr(worker, "post_collect_hook", None)
    if isinstance(hook, ProfilerHook):
        hook.close()

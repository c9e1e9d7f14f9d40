"""A collector beside training that tells what the newest weights are worth."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType

from pycollect import checks as check
from pycollect.batch.frame import MASK
from pycollect.batch.weights import weights_from, weights_of
from pycollect.collectors.episodes import Episodes
from pycollect.collectors.single import SyncDataCollector
from pycollect.stream.background import Background
from pycollect.stream.fair_lock import FairLock

Metrics = dict[str, Any]

_STEPS = 200  # of each environment in a batch
_BACKENDS = ("thread", "process", "ray")


class Evaluator:
    """Evaluates a policy in environments of its own, here and now or beside training.

    `evaluate` waits for the result. `trigger_eval` returns at once; `poll` and `wait` give results
    in the order in which they were asked for. Each environment plays as many episodes, from a
    reset on, so that long ones count as much as short ones. A context manager.

    Args:
        env: as `create_env_fn` of the collectors, of one worker.
        policy: in any of their forms. It is copied, so that it may be trained meanwhile; an
            evaluation has its weights of the moment at which it was asked for.
        policy_factory: builds the policy where it is evaluated, in place of `policy`; it has the
            weights that are given then.
        num_trajectories: episodes in each evaluation, rounded up to as many of each environment.
        max_steps: an episode is truncated after so many; None: they end by themselves.
        frames_per_batch: steps of all environments between two looks; None: 200 of each worker's.
        num_workers: with "process" and "ray", workers that each have `env`.
        collector_kwargs: further arguments of the collector.
        log_prefix: before the name of each result.
        exploration_type: how actions are drawn.
        metrics_fn: is called with the episodes, ``[N, T_max]`` with ``("collector", "mask")``;
            the numbers that it returns by name are among the results.
        on_result: is called with each result as a TensorDict, in the thread that made it.
        busy_policy: what `trigger_eval` does while an evaluation runs: "skip" it, raise an "error",
            or "queue" it.
        backend: "thread" evaluates in this process, "process" in processes beside it, "ray" in
            actors.
        seed: every evaluation plays the same episodes; None: each others.
        every: `trigger_eval` evaluates at the first and then at each so-many-th call.
        init_fn: is called first of all in a worker.
        ray_kwargs: of each actor, as `remote_configs`.

    Raises:
        TypeError, ValueError: as the collectors', before anything starts.
    """

    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        num_trajectories: int = 10,
        max_steps: int | None = None,
        frames_per_batch: int | None = None,
        num_workers: int = 1,
        collector_kwargs: Mapping[str, Any] | None = None,
        log_prefix: str = "eval",
        exploration_type: Any = InteractionType.DETERMINISTIC,
        metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None = None,
        on_result: Callable[[TensorDictBase], None] | None = None,
        busy_policy: str = "skip",
        backend: str = "thread",
        seed: int | None = None,
        every: int = 1,
        init_fn: Callable[[], None] | None = None,
        ray_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._wanted = check.check_positive("num_trajectories", num_trajectories)
        self._every = check.check_positive("every", every)
        self._busy_policy = check.check_choice(
            "busy_policy", busy_policy, ("skip", "error", "queue")
        )
        self._metrics_fn = check.check_callable("metrics_fn", metrics_fn)
        self._on_result = check.check_callable("on_result", on_result)
        self._seed = None if seed is None else check.check_seed(seed)
        self._prefix, self._policy = log_prefix, policy
        workers = check.check_positive("num_workers", num_workers)
        steps = _STEPS if max_steps is None else min(max_steps, _STEPS)
        arguments = {
            "frames_per_batch": steps * workers if frames_per_batch is None else frames_per_batch,
            "max_frames_per_traj": max_steps,
            "exploration_type": exploration_type,
            "policy_factory": policy_factory,
            "init_fn": init_fn,
            **dict(collector_kwargs or {}),
        }
        check.check_choice("backend", backend, _BACKENDS)
        self._collector = _collector(env, policy, backend, workers, ray_kwargs, arguments)
        self._evaluating = FairLock()
        self._results: deque[Future[Metrics]] = deque()
        self._triggers = self._steps = 0
        self._closed = False

    def evaluate(self, weights: Any = None, step: int | None = None) -> Metrics:
        """Evaluate, and wait for it.

        Args:
            weights: an nn.Module, or weights in a form that `update_policy_weights_` takes. None:
                those of the policy as they are now.
            step: told with the result; None: how many evaluations there were before.

        Returns:
            By name, with `log_prefix` and a slash before it: "reward" and "reward_std" (mean and
            standard deviation of the sums of rewards), "num_episodes", "episode_length" (mean),
            "fps", "step", and what `metrics_fn` returned.
        """
        return self._evaluate(self._weights_now(weights), self._next_step(step))

    def trigger_eval(self, weights: Any = None, step: int | None = None) -> bool:
        """Have it evaluated beside what this thread does, see `evaluate`; whether it will be.

        Raises:
            RuntimeError: an evaluation runs, with ``busy_policy="error"``.
        """
        check.check_open(self._closed, None)
        self._triggers += 1
        if (self._triggers - 1) % self._every:
            return False
        if self.pending and self._busy_policy == "skip":
            return False
        if self.pending and self._busy_policy == "error":
            raise RuntimeError("trigger_eval: an evaluation runs; wait() for it, or poll()")
        given, number = self._weights_now(weights), self._next_step(step)
        result: Future[Metrics] = Future()
        self._results.append(result)

        def once() -> bool:
            try:
                result.set_result(self._evaluate(given, number))
            except Exception as error:
                result.set_exception(error)  # whoever asks for the result hears of it
            return False

        Background().start(once, self.shutdown)
        return True

    @property
    def pending(self) -> bool:
        """Whether an evaluation that was triggered is not done."""
        return any(not result.done() for result in self._results)

    def poll(self, timeout: float = 0) -> Metrics | None:
        """The oldest result that nobody has had; None where there is none in so many seconds."""
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> Metrics | None:
        """The same; without a time-out as long as it takes, if one was triggered at all."""
        if not self._results:
            return None
        try:
            self._results[0].exception(timeout)
        except FutureTimeoutError:
            return None
        return self._results.popleft().result()

    def shutdown(self, timeout: float | None = None) -> None:
        """End an evaluation that runs after its batch, and the workers. Idempotent."""
        self._closed = True
        self._collector.shutdown(timeout)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _weights_now(self, weights: Any) -> dict[str, torch.Tensor]:
        own = weights_of(self._policy) if weights is None else weights_from(weights)
        return {name: value.detach().clone() for name, value in own.items()}

    def _next_step(self, step: int | None) -> int:
        self._steps += 1
        return self._steps - 1 if step is None else step

    def _evaluate(self, weights: dict[str, torch.Tensor], step: int) -> Metrics:
        with self._evaluating:
            began = time.perf_counter()
            if weights:
                self._collector.update_policy_weights_(weights, wait=True)
            self._begin()
            episodes = Episodes(self._wanted)
            while not episodes.are_enough:
                episodes.add(self._collector.next())
            td = episodes.trajectories()
            result = self._result(td, time.perf_counter() - began, step)
        if self._on_result is not None:
            self._on_result(TensorDict({k: torch.as_tensor(v) for k, v in result.items()}))
        return result

    def _begin(self) -> None:
        if self._seed is None:
            self._collector.reset()
        else:
            self._collector.set_seed(self._seed)

    def _result(self, td: TensorDictBase, seconds: float, step: int) -> Metrics:
        mask = td[MASK]
        rewards = td["next", "reward"].flatten(2).sum(-1)
        returns = torch.where(mask, rewards, 0).double().sum(1)
        own = {
            "reward": returns.mean().item(),
            "reward_std": returns.std().item() if len(returns) > 1 else 0.0,
            "num_episodes": len(td),
            "episode_length": mask.sum(1).double().mean().item(),
            "fps": int(mask.sum()) / seconds,
            "step": step,
        }
        more = {} if self._metrics_fn is None else dict(self._metrics_fn(td))
        return {f"{self._prefix}/{name}": value for name, value in {**own, **more}.items()}


def _collector(
    env: Any,
    policy: Any,
    backend: str,
    workers: int,
    ray_kwargs: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
) -> Any:
    if ray_kwargs is not None and backend != "ray":
        raise ValueError(f"ray_kwargs: expected None with backend={backend!r}, got {ray_kwargs}")
    if backend == "thread":
        if workers != 1:
            raise ValueError(f"num_workers: expected 1 with backend='thread', got {workers}")
        return SyncDataCollector(env, copy.deepcopy(policy), **arguments)
    return SyncDataCollector(
        [env] * workers,
        policy,
        num_collectors=workers,
        sync=True,
        backend=backend,
        backend_options=None if ray_kwargs is None else {"remote_configs": dict(ray_kwargs)},
        **arguments,
    )

"""Evaluate a policy, at once or in the background of training."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from pycollect import checks as check
from pycollect._core import FairLock
from pycollect.api import evaluated
from pycollect.api.binding import explained
from pycollect.arguments import completed_by
from pycollect.compat.weights import source_of
from pycollect.data.frame import MASK
from pycollect.data.weights import Weights, weights_from
from pycollect.driver.background import Background
from pycollect.driver.policy_place import with_all_names

Metrics = dict[str, Any]

_BACKENDS = ("thread", "process", "ray")
_IF_BUSY = ("skip", "error", "queue")
_REWARD = ("next", "reward")


class Evaluator:
    """Evaluate a policy in its own environments, at once or in the background.

    `evaluate` waits for the result. `trigger_eval` returns at once; `poll` and `wait` return
    results in the order of triggers. Each environment plays the same number of episodes, each from
    a reset on, so that long and short episodes count equally. An Evaluator is also a context
    manager.

    The policy acts in evaluation mode (`nn.Module.eval`). Statistics of a VecNorm or VecNormV2 in a
    TorchRL environment are frozen.

    Args:
        env: Anything that a collector accepts for one worker: an environment, a callable that
            returns one, a Gymnasium id, or a list of callables or ids. With several workers, each
            makes its own environments from it.
        policy: A policy, as for collectors. It is copied, so the original may be trained meanwhile.
            An evaluation uses its weights at the time of the call. ``None`` without a
            `policy_factory` samples random actions (default: ``None``).
        policy_factory: Callable that returns the policy in the process that evaluates it. Replaces
            `policy`; weights passed to `evaluate` are loaded into it. If its first parameter has no
            default or is named ``env``, it receives an environment: the evaluated one with
            "thread"; with other backends one made only for the factory, and closed afterwards
            (default: ``None``).
        num_trajectories: Number of episodes per evaluation, rounded up to the same number for each
            environment (default: 10).
        max_steps: Truncate an episode after this many steps. ``None`` or 0 sets no limit. With
            "thread", it is ignored for a TorchRL environment that has a StepCounter (default:
            ``None``).
        frames_per_batch: Number of steps of all environments between two checks for finished
            episodes. ``None`` means 200 per worker, or `max_steps` if that is less, rounded up to
            the same number for each environment (default: ``None``).
        num_workers: With "process" and "ray", number of workers, each with its own `env` (default:
            1).
        collector_kwargs: Further arguments of the collector. Arguments that change the layout of
            batches, the end of collection or the ends of episodes are refused, such as `postproc`,
            `split_trajs` and `set_truncated`, and so is `init_random_frames` (default: ``None``).
        log_prefix: Prefix of each result's name (default: "eval").
        exploration_type: How actions are drawn from the policy: DETERMINISTIC, RANDOM, MODE or
            MEAN, as an ExplorationType or its name (default: DETERMINISTIC).
        reward_keys: TensorDict key of the rewards (default: ("next", "reward")). Of a vector, all
            objectives are summed; `metrics_fn` may report each of them.
        device: Device on which the policy is called; `policy_device` of the collector (default:
            ``None``).
        weight_sync_schemes: `weight_sync_schemes` of the collector (default: ``None``).
        metrics_fn: Function of the episodes, ``[N, T_max]`` with ``("collector", "mask")``, that
            returns a dict of numbers; they are added to the results (default: ``None``).
        on_result: Function that is called with each result as a TensorDict, in the thread of the
            evaluation (default: ``None``).
        busy_policy: Reaction of `trigger_eval` while an evaluation runs: "skip" the new one, raise
            an "error", or "queue" it (default: "skip").
        backend: "thread" evaluates in this process, "process" in other processes, "ray" in Ray
            actors (default: "thread").
        seed: Play the same episodes in every evaluation. With ``None``, each evaluation plays
            different episodes (default: ``None``).
        every: Evaluate on the first and then every n-th call of `trigger_eval` (default: 1).
        init_fn: Function without arguments that is called in each worker before its environments
            are made (default: ``None``).
        ray_kwargs: Ray's options of each actor; `remote_configs` of RayCollector (default:
            ``None``).
        num_gpus: Number of GPUs of each actor. Defaults to ``None``: the value in `ray_kwargs`.
        done_keys: Must be ``("next", "done")``.
        collector_cls: Must be ``None``, because `backend` selects the collector.
        dump_video: Accepted without effect; dump a VideoRecorder of the environment yourself
            (default: ``True``).

    Raises:
        TypeError, ValueError: An argument is invalid; no environment or process was started.
    """

    @explained
    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        num_trajectories: int = 10,
        max_steps: int | None = None,
        frames_per_batch: int | None = None,
        num_workers: int = 1,
        collector_kwargs: Mapping[str, Any] | None = None,
        log_prefix: str = "eval",
        exploration_type: Any = InteractionType.DETERMINISTIC,
        reward_keys: Any = _REWARD,
        device: Any = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None = None,
        on_result: Callable[[TensorDictBase], None] | None = None,
        busy_policy: str = "skip",
        backend: str = "thread",
        seed: int | None = None,
        every: int = 1,
        init_fn: Callable[[], None] | None = None,
        ray_kwargs: Mapping[str, Any] | None = None,
        num_gpus: float | None = None,
        done_keys: Any = evaluated.DONE,
        collector_cls: Any = None,
        dump_video: bool = True,
    ) -> None:
        evaluated.check_given(done_keys, collector_cls)
        self._wanted = check.check_positive("num_trajectories", num_trajectories)
        self._every = check.check_positive("every", every)
        self._busy_policy = check.check_choice("busy_policy", busy_policy, _IF_BUSY)
        self._metrics_fn = check.check_callable("metrics_fn", metrics_fn)
        self._on_result = check.check_callable("on_result", on_result)
        self._seed = None if seed is None else check.check_seed(seed)
        self._reward = evaluated.check_reward_key(reward_keys)
        self._prefix, self._policy = log_prefix, policy
        workers = check.check_positive("num_workers", num_workers)
        evaluated.check_kwargs(collector_kwargs)
        limit = check.check_count("max_steps", max_steps)
        if frames_per_batch is None:
            frames_per_batch = evaluated.frames_of(env, limit) * workers
        arguments = {
            "frames_per_batch": frames_per_batch,
            "max_frames_per_traj": limit or None,
            "exploration_type": exploration_type,
            "policy_device": device,
            "weight_sync_schemes": weight_sync_schemes,
            **dict(collector_kwargs or {}),
        }
        check.check_choice("backend", backend, _BACKENDS)
        check.check_factory(policy_factory, policy)
        if backend == "thread":
            if workers != 1:
                raise ValueError(f"num_workers: expected 1 with backend='thread', got {workers}")
            evaluated.of_each_actor(backend, ray_kwargs, num_gpus)
            self._collector = evaluated.collector_here(
                env, policy, policy_factory, init_fn, arguments
            )
        else:
            arguments |= {"init_fn": init_fn, "num_collectors": workers, "backend": backend}
            arguments["backend_options"] = evaluated.of_each_actor(backend, ray_kwargs, num_gpus)
            self._collector = evaluated.remote_collector(env, policy, policy_factory, arguments)
        self._evaluating = FairLock()
        self._results: deque[Future[Metrics]] = deque()
        self._triggers = self._steps = 0
        self._closed = False

    def evaluate(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> Metrics:
        """Evaluate, and wait for the result.

        Args:
            weights: An nn.Module, or weights in any form that `update_policy_weights_` accepts.
                Defaults to ``None``: the current weights of `policy`.
            step: Returned with the result. Defaults to ``None``: the number of earlier evaluations
                without a step.
            weights_dict: ``{"policy": weights}``. Replaces `weights` (default: ``None``).

        Returns:
            A dict. Each name starts with `log_prefix` and a slash. The entries are "reward" and
            "reward_std" (mean and standard deviation of the sum of rewards), "num_episodes",
            "episode_length" (mean), "fps", "step", and the numbers that `metrics_fn` returned.
        """
        return self._evaluate(self._weights_now(weights, weights_dict), self._next_step(step))

    @completed_by(evaluate)
    def trigger_eval(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> bool:
        """Start an evaluation in the background.

        Args:
            ...: See evaluate.

        Returns:
            Whether an evaluation starts or is queued; `every` and `busy_policy` may skip it. `poll`
            and `wait` return the result.

        Raises:
            RuntimeError: An evaluation is running, with ``busy_policy="error"``.
        """
        self._evaluating.check_own_process()
        check.check_open(self._closed)
        self._triggers += 1
        if (self._triggers - 1) % self._every:
            return False
        if self.pending and self._busy_policy == "skip":
            return False
        if self.pending and self._busy_policy == "error":
            raise RuntimeError(
                "trigger_eval: an evaluation is still running; call wait() first, or use "
                "busy_policy='queue'"
            )
        given, number = self._weights_now(weights, weights_dict), self._next_step(step)
        result: Future[Metrics] = Future()
        self._results.append(result)

        def once() -> bool:
            nonlocal result
            try:
                result.set_result(self._evaluate(given, number))
            except BaseException as error:  # without a result, `wait` would never return
                result.set_exception(error)
            finally:
                del result  # breaks the cycle: exception, traceback, this frame
            return False

        Background().start(once, self.shutdown)
        return True

    @property
    def pending(self) -> bool:
        """Whether a triggered evaluation is still running or queued."""
        return not self._closed and any(not result.done() for result in self._results)

    def wait(self, timeout: float | None = None) -> Metrics | None:
        """Wait for the oldest unread result.

        Args:
            timeout: Maximum number of seconds to wait. ``None`` waits without limit (default:
                ``None``).

        Returns:
            The dict that `evaluate` returns. ``None`` if it is not ready in time, or no evaluation
            was triggered.

        Raises:
            Exception: The evaluation raised it.
        """
        self._evaluating.check_own_process()
        if not self._results:
            return None
        try:
            self._results[0].exception(timeout)
        except FutureTimeoutError:
            return None
        return self._results.popleft().result()

    @completed_by(wait)
    def poll(self, timeout: float = 0) -> Metrics | None:
        """Return the oldest unread result, if it is ready.

        Args:
            timeout: Maximum number of seconds to wait (default: 0).
        """
        return self.wait(timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop a running evaluation after its current batch, and end the workers. Idempotent.

        Args:
            timeout: Seconds in which workers must close their environments. ``None`` means 30
                (default: ``None``).
        """
        self._closed = True
        self._collector.shutdown(timeout)

    def state_dict(self) -> dict[str, Any]:
        """Return the counter of evaluations.

        Returns:
            A dict with "step_counter", the number of evaluations without a step.

        Raises:
            RuntimeError: Results are pending or unread.
        """
        self._check_idle("state_dict")
        return {"step_counter": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the counter of evaluations.

        Args:
            state_dict: Result of :meth:`state_dict`.

        Raises:
            RuntimeError: Results are pending or unread.
        """
        self._check_idle("load_state_dict")
        self._steps = int(state_dict.get("step_counter", 0))

    @staticmethod
    def extract_weights(policy: nn.Module) -> TensorDictBase:
        """Return a copy of the policy's current weights in host memory.

        Args:
            policy: An nn.Module.

        Returns:
            A TensorDict like the one of `TensorDict.from_module`, for `evaluate`.
        """
        weights: TensorDictBase = TensorDict.from_module(policy).data
        return weights.detach().clone().cpu()

    def __enter__(self) -> Evaluator:
        """Return the Evaluator itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Shut the Evaluator down."""
        self.shutdown()

    def _check_idle(self, method: str) -> None:
        if self._results:
            raise RuntimeError(
                f"{method}: an earlier result was not returned yet; call wait() first"
            )

    def _weights_now(self, weights: Any, by_model: Any) -> Weights:
        source = source_of({"weights": weights}, None, by_model or None)
        with evaluated.naming_weights():
            current = with_all_names(self._policy) if source is None else weights_from(source)
        return replace(current.copied(), modes={})  # the copy stays in evaluation mode

    def _next_step(self, step: int | None) -> int:
        if step is not None:
            return step
        self._steps += 1
        return self._steps - 1

    def _evaluate(self, weights: Weights, step: int) -> Metrics:
        with self._evaluating:
            began = time.perf_counter()
            if weights:
                with evaluated.naming_weights():
                    self._collector.update_policy_weights_(weights, wait=True)
            if self._seed is None:
                self._collector.reset()
            else:
                self._collector.set_seed(self._seed)
            episodes = evaluated.Episodes(self._wanted)
            while not episodes.are_enough:
                episodes.add(self._collector.next())
            td = episodes.trajectories()
            result = self._result(td, time.perf_counter() - began, step)
        if self._on_result is not None:
            self._on_result(TensorDict({k: torch.as_tensor(v) for k, v in result.items()}))
        return result

    def _result(self, td: TensorDictBase, seconds: float, step: int) -> Metrics:
        mask = td[MASK]
        rewards = evaluated.rewards_of(td, self._reward)
        returns = torch.where(mask, rewards, 0).double().sum(1)
        metrics = {
            "reward": returns.mean().item(),
            "reward_std": returns.std().item() if len(returns) > 1 else 0.0,
            "num_episodes": len(td),
            "episode_length": mask.sum(1).double().mean().item(),
            "fps": int(mask.sum()) / seconds,
            "step": step,
        }
        more = {} if self._metrics_fn is None else dict(self._metrics_fn(td))
        return {f"{self._prefix}/{name}": value for name, value in {**metrics, **more}.items()}

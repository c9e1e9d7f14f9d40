"""A collector beside training that tells what the newest weights are worth."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from pycollect import checks as check
from pycollect.batch.frame import MASK
from pycollect.batch.weights import Weights, weights_from, weights_of
from pycollect.collectors import evaluated
from pycollect.collectors.arguments.given import telling
from pycollect.collectors.episodes import Episodes
from pycollect.collectors.single import SyncDataCollector
from pycollect.docstrings import completed_by
from pycollect.envs.entry import is_env
from pycollect.envs.single import close_quietly
from pycollect.policy import build
from pycollect.stream.background import Background
from pycollect.stream.fair_lock import FairLock
from pycollect.stream.weight_calls import source_of

Metrics = dict[str, Any]

_STEPS = 200  # of each environment in a batch
_BACKENDS = ("thread", "process", "ray")
_OFF: Mapping[str, Callable[[Any], bool]] = {
    "drop_uncollected": operator.not_,
    "split_trajs": operator.not_,
    "trajs_per_batch": lambda value: not check.check_count("trajs_per_batch", value),
    "postproc": lambda value: value is None,
    "replay_buffer": lambda value: value is None,
    "cat_results": lambda value: value is None or value == "stack",
    "total_frames": lambda value: check.check_total_frames("total_frames", value) is None,
    "set_truncated": operator.not_,
    "reset_at_each_iter": operator.not_,
}
"""Arguments with which episodes cannot be counted, and whether a value is without effect."""
_REWARD, _DONE = ("next", "reward"), ("next", "done")


class Evaluator:
    """Evaluates a policy in environments of its own, here and now or beside training.

    `evaluate` waits for the result. `trigger_eval` returns at once; `poll` and `wait` give results
    in the order in which they were asked for. Each environment plays as many episodes, from a
    reset on, so that long ones count as much as short ones. A context manager.

    The policy acts in evaluation mode (`nn.Module.eval`). Statistics that a VecNorm or VecNormV2 of
    TorchRL's gathers in its environment are frozen.

    Args:
        env: as `create_env_fn` of the collectors, of one worker.
        policy: in any of their forms. It is copied, so that it may be trained meanwhile; an
            evaluation has its weights of the moment at which it was asked for. None: random
            actions, without a `policy_factory`.
        policy_factory: builds the policy where it is evaluated, in place of `policy`; it has the
            weights that are given then. Where its first parameter has no default, or is called
            ``env``, it gets an environment: with "thread" the one that is evaluated, elsewhere one
            that is made for it alone, and closed.
        num_trajectories: episodes in each evaluation, rounded up to as many of each environment.
        max_steps: an episode is truncated after so many; None or 0: they end by themselves, as do
            those of a TorchRL environment that has a StepCounter, with "thread".
        frames_per_batch: steps of all environments between two looks; None: 200 of each worker's.
        num_workers: with "process" and "ray", workers that each have `env`.
        collector_kwargs: further arguments of the collector, but for those that give batches
            another form, an end, or episodes other ends (`postproc`, `split_trajs`, `set_truncated`
            and so on).
        log_prefix: before the name of each result.
        exploration_type: how actions are drawn.
        reward_keys: where rewards are, a nested key of TensorDict.
        device: where the policy acts, as `policy_device`.
        weight_sync_schemes: as the collectors'.
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
        num_gpus: of each actor; None: what `ray_kwargs` say.
        done_keys: ``("next", "done")``, which has to be there.
        collector_cls: None; `backend` says where it is evaluated.
        dump_video: has no effect: what a VideoRecorder has seen is dumped by whoever made it.

    Raises:
        TypeError, ValueError: as the collectors', before anything starts.
    """

    @telling
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
        done_keys: Any = _DONE,
        collector_cls: Any = None,
        dump_video: bool = True,
    ) -> None:
        _check_given(done_keys, collector_cls)
        self._wanted = check.check_positive("num_trajectories", num_trajectories)
        self._every = check.check_positive("every", every)
        self._busy_policy = check.check_choice(
            "busy_policy", busy_policy, ("skip", "error", "queue")
        )
        self._metrics_fn = check.check_callable("metrics_fn", metrics_fn)
        self._on_result = check.check_callable("on_result", on_result)
        self._seed = None if seed is None else check.check_seed(seed)
        self._prefix, self._policy, self._reward = log_prefix, policy, reward_keys
        workers = check.check_positive("num_workers", num_workers)
        _check_kwargs(collector_kwargs)
        limit = check.check_count("max_steps", max_steps)
        if frames_per_batch is None:
            frames_per_batch = _frames_of(env, limit) * workers
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
            _check_of_one_process(workers, ray_kwargs, num_gpus)
            self._collector = _collector_here(env, policy, policy_factory, init_fn, arguments)
        else:
            arguments |= {"init_fn": init_fn, "num_collectors": workers, "backend": backend}
            arguments["backend_options"] = _of_each_actor(backend, ray_kwargs, num_gpus)
            self._collector = _collector_elsewhere(env, policy, policy_factory, arguments)
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
        """Evaluate, and wait for it.

        Args:
            weights: an nn.Module, or weights in a form that `update_policy_weights_` takes. None:
                those of the policy as they are now.
            step: told with the result; None: how many evaluations there were before without one.
            weights_dict: ``{"policy": weights}``, instead.

        Returns:
            By name, with `log_prefix` and a slash before it: "reward" and "reward_std" (mean and
            standard deviation of the sums of rewards), "num_episodes", "episode_length" (mean),
            "fps", "step", and what `metrics_fn` returned.
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
        """Have it evaluated beside what this thread does.

        Args:
            ...: those of `evaluate`.

        Returns:
            Whether it will be: `every` and `busy_policy` may leave it out. `poll` and `wait` have
            the result.

        Raises:
            RuntimeError: an evaluation runs, with ``busy_policy="error"``.
        """
        self._evaluating.check_here()
        check.check_open(self._closed)
        self._triggers += 1
        if (self._triggers - 1) % self._every:
            return False
        if self.pending and self._busy_policy == "skip":
            return False
        if self.pending and self._busy_policy == "error":
            raise RuntimeError(
                "trigger_eval: an evaluation runs; wait() for it, or poll(), or make the Evaluator "
                "with busy_policy='queue'"
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
                del result  # it holds the exception, whose traceback holds this frame
            return False

        Background().start(once, self.shutdown)
        return True

    @property
    def pending(self) -> bool:
        """Whether an evaluation that was triggered is not done, and is going to be."""
        return not self._closed and any(not result.done() for result in self._results)

    def poll(self, timeout: float = 0) -> Metrics | None:
        """The oldest result that nobody has had.

        Args:
            timeout: seconds that it is waited for.

        Returns:
            What `evaluate` returns, by name; None where there is none by then.

        Raises:
            Exception: what the evaluation raised.
        """
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> Metrics | None:
        """The oldest result that nobody has had, which is waited for.

        Args:
            timeout: seconds that it is waited for; None: as long as it takes.

        Returns:
            What `evaluate` returns, by name; None where there is none by then, or none was
            triggered at all.

        Raises:
            Exception: what the evaluation raised.
        """
        self._evaluating.check_here()
        if not self._results:
            return None
        try:
            self._results[0].exception(timeout)
        except FutureTimeoutError:
            return None
        return self._results.popleft().result()

    def shutdown(self, timeout: float | None = None) -> None:
        """End an evaluation that runs after its batch, and the workers. Idempotent.

        Args:
            timeout: seconds that workers elsewhere have to close their environments; None: half a
                minute.
        """
        self._closed = True
        self._collector.shutdown(timeout)

    def state_dict(self) -> dict[str, Any]:
        """How far it has counted.

        Returns:
            "step_counter", the evaluations so far that were given no step.

        Raises:
            RuntimeError: results are still to come, or nobody has had them.
        """
        self._check_idle("state_dict")
        return {"step_counter": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting from there.

        Args:
            state_dict: of :meth:`state_dict`.

        Raises:
            RuntimeError: results are still to come, or nobody has had them.
        """
        self._check_idle("load_state_dict")
        self._steps = int(state_dict.get("step_counter", 0))

    @staticmethod
    def extract_weights(policy: nn.Module) -> TensorDictBase:
        """The policy's weights of this moment, copied into host memory.

        Args:
            policy: any module.

        Returns:
            A TensorDict as `TensorDict.from_module` makes it, which `evaluate` takes.
        """
        weights: TensorDictBase = TensorDict.from_module(policy).data
        return weights.detach().clone().cpu()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _check_idle(self, method: str) -> None:
        if self._results:
            raise RuntimeError(f"{method}: expected no result that nobody has had; wait() for it")

    def _weights_now(self, weights: Any, by_model: Any) -> Weights:
        source = source_of({"weights": weights}, None, by_model or None)
        own = weights_of(self._policy) if source is None else weights_from(source)
        return replace(own.copied(), modes={})  # the copy stays in evaluation mode

    def _next_step(self, step: int | None) -> int:
        if step is not None:
            return step
        self._steps += 1
        return self._steps - 1

    def _evaluate(self, weights: Weights, step: int) -> Metrics:
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
        rewards = td[self._reward].flatten(2).sum(-1)
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


def _check_given(done_keys: Any, collector_cls: Any) -> None:
    if not check.is_one_of(done_keys, (_DONE,)):
        raise ValueError(f"done_keys: expected {_DONE}, by which episodes end, got {done_keys!r}")
    if collector_cls is not None:
        raise ValueError(
            f"collector_cls: expected None, got {collector_cls!r}; backend says where to evaluate"
        )


def _check_kwargs(given: Any) -> None:
    """Whole episodes are counted, in each environment's row of batches as they are collected."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"collector_kwargs: expected a dict or None, got {type(given).__name__}")
    if unnamed := [name for name in given or () if not isinstance(name, str)]:
        raise TypeError(f"collector_kwargs: expected names of arguments as keys, got {unnamed}")
    others = [repr(name) for name, is_off in _OFF.items() if not is_off((given or {}).get(name))]
    if others:
        raise ValueError(
            f"collector_kwargs: expected no {', '.join(others)}; an Evaluator counts whole "
            "episodes in batches as they are collected, and leaves out cells without a frame"
        )


def _frames_of(env: Any, limit: int) -> int:
    """Of a batch where nobody says it: as many steps of each environment of a list."""
    steps = min(limit, _STEPS) if limit else _STEPS
    envs = max(len(env), 1) if isinstance(env, (list, tuple)) else 1
    return -(-steps // envs) * envs


def _check_of_one_process(workers: int, ray_kwargs: Any, num_gpus: Any) -> None:
    if workers != 1:
        raise ValueError(f"num_workers: expected 1 with backend='thread', got {workers}")
    _of_each_actor("thread", ray_kwargs, num_gpus)


def _of_each_actor(
    backend: str, ray_kwargs: Mapping[str, Any] | None, num_gpus: float | None
) -> dict[str, Any] | None:
    """What `backend_options` are to say."""
    for name, value in (("ray_kwargs", ray_kwargs), ("num_gpus", num_gpus)):
        if value is not None and backend != "ray":
            raise ValueError(f"{name}: expected None with backend={backend!r}, got {value}")
    gpus = {} if num_gpus is None else {"num_gpus": num_gpus}
    configs = {**(ray_kwargs or {}), **gpus}
    return {"remote_configs": configs} if configs else None


def _collector_here(
    env: Any, policy: Any, factory: Any, init_fn: Any, arguments: dict[str, Any]
) -> SyncDataCollector:
    """Evaluates in this process, an environment that the factory may be given."""
    if check.check_callable("init_fn", init_fn) is not None:
        init_fn()
    own = evaluated.env_here(env, arguments.pop("create_env_kwargs", None))
    try:
        if evaluated.counts_steps(own):
            arguments["max_frames_per_traj"] = None
        if factory is None:
            acting = evaluated.own_policy(policy)
        else:
            acting = build(evaluated.MakesPolicy(factory, own))
        return SyncDataCollector(own, acting, **arguments)
    except BaseException:
        if is_env(own):
            close_quietly(own)
        raise


def _collector_elsewhere(env: Any, policy: Any, factory: Any, arguments: dict[str, Any]) -> Any:
    own = evaluated.env_elsewhere(env)
    if factory is not None:
        arguments["policy_factory"] = evaluated.MakesPolicy(factory, own)
    envs = [own] * arguments["num_collectors"]
    return SyncDataCollector(envs, evaluated.own_policy(policy), sync=True, **arguments)

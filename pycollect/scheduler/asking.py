"""Questions to workers elsewhere, between two of their rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollect.docstrings import completed_by
from pycollect.scheduler.awaiting import Call
from pycollect.scheduler.scheduler import Scheduler
from pycollect.worker.one_worker import OneWorker
from pycollect.worker.paths import called, calls, resolved


class Asking:
    """What is asked of workers by name; each answers once the rollouts before are done.

    No rollout is lost by it. What a worker raises is raised here, same type, once all who were
    asked have answered; a worker that dies meanwhile is replaced, and the asker told.
    """

    _source: Scheduler

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the first worker's environment, as a copy.

        Args:
            attr: its name.

        Returns:
            What pickled there and was unpickled here.

        Raises:
            AttributeError: there is none of that name.
            TypeError: it does not pickle.
            WorkerError: the worker died.
            TimeoutError: it did not answer within `worker_timeout`.
        """
        return self._ask_first("getattr_env", attr)

    @completed_by(getattr_env)
    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the first worker's policy, as a copy.

        Args:
            ...: that of `getattr_env`.
        """
        return self._ask_first("getattr_policy", attr)

    def get_distant_attr(self, attr: str) -> list[Any]:
        """What stands at a path in each worker.

        Args:
            attr: names and indices from a worker on: "env.action_spec", "policy.module[0]".

        Returns:
            Copies, in the order of workers.

        Raises:
            AttributeError: there is nothing of that name.
            TypeError: it does not pickle.
            WorkerError: a worker died.
            TimeoutError: one did not answer within `worker_timeout`.
        """
        workers = self._source.group.in_order
        question: Call = ("get_distant_attr", (attr,), {})
        return self._ask({worker.index: question for worker in workers})

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """What a method returns in each worker, in their order.

        Args:
            method_name: its path in a worker, like "env.close" or "get_distant_attr".
            list_of_args, list_of_kwargs: of each worker; None: none.

        Returns:
            Copies of what it returned, in the order of workers.

        Raises:
            ValueError: not one entry for each worker.
            AttributeError: there is no such method, or it is one that the collector has to call.
        """
        workers = self._source.group.in_order
        each = calls(list_of_args, list_of_kwargs, len(workers))
        if method_name == "update_policy_weights_":  # which the collector gives to one worker
            update = resolved(self, method_name)
            return [
                update(*args, **{**kwargs, "worker_ids": worker.index})
                for worker, (args, kwargs) in zip(workers, each, strict=True)
            ]
        return self._ask(
            {
                worker.index: ("cascade_execute", (method_name, *args), kwargs)
                for worker, (args, kwargs) in zip(workers, each, strict=True)
            }
        )

    @completed_by(OneWorker.cascade_execute)
    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """"""  # the text is that of OneWorker
        return called(self, attr_path, *args, **kwargs)

    def get_model(self, model_id: str) -> Any:
        """The caller's policy for "policy"; for anything else what stands at that path.

        Args:
            model_id: "policy", or names and indices from the collector on.

        Returns:
            What stands there, in this process.

        Raises:
            AttributeError: there is nothing of that name.
        """
        return resolved(self, model_id)

    def fake_tensordict(self) -> Any:
        """Refused: only a collector in this process has environments to tell what is in a batch.

        Raises:
            NotImplementedError: always. ``Collector(...).fake_tensordict()`` with one of the
                environments gives zeros of the shape of one worker's rollout.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.fake_tensordict: the environments are in other processes; use "
            "Collector(...).fake_tensordict() with one of them"
        )

    def _ask_first(self, method: str, attr: str) -> Any:
        first, *_ = self._source.group.in_order
        return self._ask({first.index: (method, (attr,), {})})[0]

    def _ask(self, questions: Mapping[int, Call]) -> list[Any]:
        return self._source.awaiting.ask(questions)

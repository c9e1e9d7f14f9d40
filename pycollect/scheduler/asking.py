"""Requests to workers in other processes, answered between two rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollect.docstrings import completed_by
from pycollect.scheduler.awaiting import Call
from pycollect.scheduler.scheduler import Scheduler
from pycollect.worker.one_worker import OneWorker
from pycollect.worker.paths import called, calls, resolved


class Asking:
    """Methods that send a request to workers, which reply after their current rollouts.

    Requests lose no rollouts. An exception in a worker is raised here with the same type, after all
    workers have replied. If a worker dies meanwhile, it is replaced and the caller gets a
    WorkerError.
    """

    _source: Scheduler

    def getattr_env(self, attr: str) -> Any:
        """Return a copy of an attribute of the first worker's environment.

        Args:
            attr: Name of the attribute.

        Returns:
            The attribute, pickled in the worker and unpickled here.

        Raises:
            AttributeError: The attribute does not exist.
            TypeError: It cannot be pickled.
            WorkerError: The worker died.
            TimeoutError: The worker did not reply within `worker_timeout`.
        """
        return self._ask_first("getattr_env", attr)

    @completed_by(getattr_env)
    def getattr_policy(self, attr: str) -> Any:
        """Return a copy of an attribute of the first worker's policy.

        Args:
            ...: See getattr_env.
        """
        return self._ask_first("getattr_policy", attr)

    def get_distant_attr(self, attr: str) -> list[Any]:
        """Return a copy of the object at a path in each worker.

        Args:
            attr: Path of names and indices that starts at the worker, such as "env.action_spec" or
                "policy.module[0]".

        Returns:
            Copies, in the order of workers.

        Raises:
            AttributeError: No object exists at that path.
            TypeError: It cannot be pickled.
            WorkerError: A worker died.
            TimeoutError: A worker did not reply within `worker_timeout`.
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
        """Call a method in each worker.

        Args:
            method_name: Path of the method in a worker, such as "env.close" or "get_distant_attr".
            list_of_args, list_of_kwargs: Arguments and keyword arguments, one entry per worker.
                ``None`` means no arguments (default: ``None``).

        Returns:
            Copies of the return values, in the order of workers.

        Raises:
            ValueError: A list does not have one entry per worker.
            AttributeError: The method does not exist, or only the collector may call it.
        """
        workers = self._source.group.in_order
        each = calls(list_of_args, list_of_kwargs, len(workers))
        if method_name == "update_policy_weights_":  # the collector updates each worker itself
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
        """"""  # completed by OneWorker.cascade_execute
        return called(self, attr_path, *args, **kwargs)

    def get_model(self, model_id: str) -> Any:
        """Return the caller's policy for "policy", or the object at another path.

        Args:
            model_id: "policy", or a path of names and indices that starts at the collector.

        Returns:
            The object in this process.

        Raises:
            AttributeError: No object exists at that path.
        """
        return resolved(self, model_id)

    def fake_tensordict(self) -> Any:
        """Refused, because only in-process collectors have environments in this process.

        Raises:
            NotImplementedError: Always. Call ``Collector(...).fake_tensordict()`` with one of the
                environments; it returns zeros with the shape of one worker's rollout.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.fake_tensordict: the environments run in other processes; call "
            "fake_tensordict() of a Collector with one of these environments"
        )

    def _ask_first(self, method: str, attr: str) -> Any:
        first, *_ = self._source.group.in_order
        return self._ask({first.index: (method, (attr,), {})})[0]

    def _ask(self, questions: Mapping[int, Call]) -> list[Any]:
        return self._source.awaiting.ask(questions)

"""TorchRL's names over the native Collector."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakSet

from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

from pycollect import checks as check
from pycollect.arguments import completed_by, exposes
from pycollect.compat.profiling import Profiled
from pycollect.compat.weight_options import WeightOptions, end_receiver
from pycollect.compat.weights import WeightUpdates
from pycollect.driver.collector import Collector
from pycollect.driver.flow import Flow
from pycollect.driver.options import StreamOptions
from pycollect.driver.stream import Source
from pycollect.worker.options import POST, PRE, PostHook, PreHook


class Done(Coroutine[Any, Any, None]):
    """A finished coroutine; it need not be awaited."""

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield

    def send(self, value: Any) -> NoReturn:
        """Raise StopIteration, because the coroutine is finished."""
        raise StopIteration

    def throw(self, *error: Any) -> NoReturn:
        """Raise the given exception."""
        raise error[1] if len(error) > 1 and error[1] is not None else error[0]

    def close(self) -> None:
        """Do nothing."""


class OwnAttributes:
    """Setting an unknown attribute raises AttributeError, so that typing errors are noticed.

    Allowed are attributes of the class (properties decide for themselves), annotated names, and
    names that start with "_". A user's subclass may set other names, unless they resemble an
    attribute of the collector.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        cls = type(self)
        if name[:1] != "_" and not any(
            name in vars(kind) or name in inspect.get_annotations(kind) for kind in cls.__mro__
        ):
            members = inspect.getmembers(cls, lambda member: isinstance(member, property))
            settable = [name for name, own in members if name[0] != "_" and own.fset is not None]
            near = difflib.get_close_matches(name, settable, n=1, cutoff=0.8)
            if near or cls.__module__.startswith("pycollect."):
                hint = f"did you mean {near[0]!r}?" if near else f"it has {settable}."
                raise AttributeError(
                    f"{cls.__name__} has no settable attribute {name!r}; {hint} In your own "
                    "subclass, annotate new attributes or start their names with '_'"
                )
        super().__setattr__(name, value)


_registered_with: WeakSet[type] = WeakSet()


class VirtualBaseCollector:
    """Instances count as instances of TorchRL's BaseCollector, without inheriting from it.

    This does not import TorchRL: if TorchRL is imported, the class is registered with it. For
    ``isinstance(collector, cls)``, an abstract class first reads ``collector.__class__``, and this
    property makes the registration, regardless of the order of imports. ``issubclass`` reads no
    attribute of the collector. It is correct if TorchRL was imported before a collector class or a
    collector was made, or after an ``isinstance`` call.
    """

    # super() without arguments needs the compiler's __class__, which the property below replaces.
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super(VirtualBaseCollector, cls).__init_subclass__(**kwargs)  # noqa: UP008
        register_with_torchrl()

    def __init__(self) -> None:
        register_with_torchrl()

    def _registered_class(self) -> type:
        register_with_torchrl()
        return type(self)

    def _set_class(self, cls: type) -> None:
        object.__dict__["__class__"].__set__(self, cls)

    __class__ = property(_registered_class, _set_class)


# Like TorchRL's collectors, so that a DataLoader works.
IterableDataset.register(VirtualBaseCollector)


def register_with_torchrl() -> None:
    """Register the collectors with TorchRL's base class, if it is imported."""
    base = getattr(sys.modules.get("torchrl.collectors._base"), "BaseCollector", None)
    if base is not None and base not in _registered_with:
        base.register(VirtualBaseCollector)
        _registered_with.add(base)


@exposes(StreamOptions, "_flow.options")
class TorchRLCollector(WeightUpdates, Profiled, OwnAttributes, VirtualBaseCollector, Collector):
    """A Collector with TorchRL's names; the base of all collectors that users make.

    Args:
        pre_hook, post_hook: Called before and after each rollout.
    """

    replay_buffer: Any
    replay_write_mode: str | None
    extend_buffer: bool
    init_random_frames: int
    split_trajs: bool
    traj_format: str
    track_traj_ids: bool

    def __init__(
        self,
        flow: Flow,
        source: Source,
        weights: WeightOptions,
        pre_hook: PreHook | None = None,
        post_hook: PostHook | None = None,
    ) -> None:
        self._hooks: dict[str, Callable[..., Any] | None] = {PRE: pre_hook, POST: post_hook}
        VirtualBaseCollector.__init__(self)
        WeightUpdates.__init__(self, weights)
        Collector.__init__(self, flow, source)

    def _start_source(self) -> None:
        if self._weight_options.updater is not None:
            self.weight_updater = self._weight_options.updater
        super()._start_source()
        self.register_scheme_receiver(self._weight_options.receivers)

    def _start_filling(self) -> None:
        self._check_no_profile()
        super()._start_filling()

    def _set_hook(self, name: str, hook: Callable[..., Any] | None) -> None:
        """Set a hook; workers in other processes call a copy, from their next rollout on."""
        self._pass_hook_on(name, check.check_callable(name, hook))
        self._hooks[name] = hook

    def _pass_hook_on(self, name: str, hook: Callable[..., Any] | None) -> None:
        if name == POST and self._flow.statistics.has_begun:
            self.disable_profile()
        self._flow.moving.check_own_process()
        self._source.set_hook(name, hook)
        if name == POST:
            self._set_profilers(hook)

    def _end_all(self, timeout: float | None, close_env: bool) -> None:
        self._flow.closed = True
        # The schemes' queues belong to the sender: their own `shutdown` would stop all receivers.
        for scheme in self._receivers.values():
            end_receiver(scheme)
        super()._end_all(timeout, close_env)

    def _close_source(self, timeout: float | None, close_env: bool) -> None:
        try:
            self._stop_profilers()
        finally:  # also if the trace cannot be saved
            super()._close_source(timeout, close_env)

    @property
    def pre_collect_hook(self) -> PreHook | None:
        """Function without arguments that is called before each rollout."""
        return self._hooks[PRE]

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: PreHook | None) -> None:
        self._set_hook(PRE, hook)

    @property
    def post_collect_hook(self) -> PostHook | None:
        """Function that is called with each rollout, or batch if in-process, and may change it."""
        return self._hooks[POST]

    @post_collect_hook.setter
    def post_collect_hook(self, hook: PostHook | None) -> None:
        self._set_hook(POST, hook)

    def set_post_collect_hook(self, hook: PostHook | None) -> None:
        """Set `post_collect_hook`, by TorchRL's name.

        Args:
            hook: Function that is called with each rollout, a TensorDict [T] or [P, T]. An
                in-process collector calls it with each batch before it is returned. ``None``
                removes the hook.

        Raises:
            TypeError: The hook is not callable, or workers in other processes need it and it cannot
                be pickled.
        """
        self._set_hook(POST, hook)

    @property
    def policy(self) -> Any:
        """The policy that the collector was made with, or ``None``.

        In-process collectors return the policy that acts, on its device, also if a `policy_factory`
        built it.
        """
        return self._source.policy

    @property
    def postproc(self) -> Callable[[TensorDictBase], TensorDictBase] | None:
        """Function that is called with each batch before it is returned, or ``None``.

        It may be set; the new function applies to later batches. A value that is neither callable
        nor ``None`` raises a TypeError.
        """
        return self._flow.options.postproc

    @postproc.setter
    def postproc(self, function: Callable[[TensorDictBase], TensorDictBase] | None) -> None:
        function = check.check_callable("postproc", function)
        self._flow.options = replace(self._flow.options, postproc=function)

    @property
    def trajs_per_batch(self) -> int | None:
        """Number of complete trajectories per batch; ``None`` if batches count frames."""
        return self._flow.options.trajs_per_batch or None

    @property
    def worker_idx(self) -> int | None:
        """Index of this collector if it is a worker of another one, else ``None``."""
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, index: int | None) -> None:
        self._worker_idx = index

    def is_running(self) -> bool:
        """Return whether background collection runs."""
        return self._background.running

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Return the stream itself, like ``iter()``.

        Returns:
            The collector. It yields batches of the shape listed under "Yields" of the class, or
            ``None`` for each batch that goes to a replay buffer.
        """
        return iter(self)

    def get_policy_version(self) -> int:
        """Return `policy_version`, the number of weight updates, by TorchRL's name."""
        return self.policy_version

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer.

        Args:
            attr: Name of the attribute.

        Returns:
            The attribute itself.

        Raises:
            AttributeError: The replay buffer has no such attribute, or the collector has none.
        """
        return getattr(self.replay_buffer, attr)

    @completed_by(Collector.shutdown)
    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> Any:
        """Shut the collector down, including background collection, and wait until that is done.

        Args:
            ...: See shutdown.

        Returns:
            ``None``. RayCollector returns an awaitable.
        """
        self.shutdown(timeout, close_env)

"""Functions of the user's around each rollout, given at construction or set later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from pycollect import checks as check

PreHook = Callable[[], Any]
PostHook = Callable[[TensorDictBase], Any]

PRE, POST = "pre_collect_hook", "post_collect_hook"


class Hooked(ABC):
    """The hooks as properties. Whoever collects calls them; None: nothing is called.

    Where workers run elsewhere each is sent a copy, pickled, which it calls from its next rollout
    to start on. Anything but a callable or None is a TypeError, also one that does not pickle.
    """

    def __init__(self, pre: PreHook | None, post: PostHook | None) -> None:
        self._hooks: dict[str, Callable[..., Any] | None] = {PRE: pre, POST: post}

    @property
    def pre_collect_hook(self) -> PreHook | None:
        """Called without arguments before each rollout."""
        return self._hooks[PRE]

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: PreHook | None) -> None:
        self._set_hook(PRE, hook)

    @property
    def post_collect_hook(self) -> PostHook | None:
        """Called with each rollout, which it may change; in this process: with each batch."""
        return self._hooks[POST]

    @post_collect_hook.setter
    def post_collect_hook(self, hook: PostHook | None) -> None:
        self._set_hook(POST, hook)

    def set_post_collect_hook(self, hook: PostHook | None) -> None:
        """Have another function called with each rollout: what setting `post_collect_hook` does.

        Args:
            hook: is called with a TensorDict, [T] or [P, T]; in this process, with each batch as it
                is delivered. None: nothing is called.

        Raises:
            TypeError: it cannot be called, or has to go to workers elsewhere and does not pickle.
        """
        self._set_hook(POST, hook)

    def _set_hook(self, name: str, hook: Callable[..., Any] | None) -> None:
        self._pass_hook_on(name, check.check_callable(name, hook))
        self._hooks[name] = hook

    @abstractmethod
    def _pass_hook_on(self, name: str, hook: Callable[..., Any] | None) -> None:
        """Give a hook to whoever calls it."""

"""The user's functions that run before and after each rollout."""

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
    """Both hooks as properties; ``None`` means that no function is called.

    Workers in other processes receive a pickled copy, which they call from their next rollout on. A
    hook that is neither callable nor ``None``, or that such workers need and cannot be pickled,
    raises a TypeError.
    """

    def __init__(self, pre: PreHook | None, post: PostHook | None) -> None:
        self._hooks: dict[str, Callable[..., Any] | None] = {PRE: pre, POST: post}

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

    def _set_hook(self, name: str, hook: Callable[..., Any] | None) -> None:
        self._pass_hook_on(name, check.check_callable(name, hook))
        self._hooks[name] = hook

    @abstractmethod
    def _pass_hook_on(self, name: str, hook: Callable[..., Any] | None) -> None:
        """Pass a hook to the code that calls it."""

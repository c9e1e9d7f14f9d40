"""An awaitable that is already done."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, NoReturn


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

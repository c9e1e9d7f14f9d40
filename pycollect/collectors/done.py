"""What is awaited where all was done before."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, NoReturn


class Done(Coroutine[Any, Any, None]):
    """A coroutine that has ended; nothing is missed by whoever does not await it."""

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield

    def send(self, value: Any) -> NoReturn:
        """It has ended."""
        raise StopIteration

    def throw(self, *error: Any) -> NoReturn:
        """What is thrown passes through."""
        raise error[1] if len(error) > 1 and error[1] is not None else error[0]

    def close(self) -> None:
        """Nothing is left to be closed."""

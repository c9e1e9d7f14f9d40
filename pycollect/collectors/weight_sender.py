"""Weights on their way to the workers: packed once per version and form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycollect._core import Leaf
from pycollect.collectors.remote_worker import Buffer
from pycollect.collectors.workforce import Member
from pycollect.weights import Weights, WeightSlab, check_same


class WeightSender:
    """Sends weights to workers, and remembers the newest for those that are to come.

    Args:
        put: of the engine: what stands for a packed buffer in several calls.

    Attributes:
        version: of the newest weights; 0: those that the workers were made with.
    """

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self._put = put
        self._slabs: dict[tuple[Leaf, ...], WeightSlab] = {}
        self._newest: Weights = {}
        self._references: dict[tuple[Leaf, ...], Any] = {}
        self._edition = 0
        self.version = 0

    @property
    def newest(self) -> Weights:
        """The weights that were sent last; none before the first time."""
        return self._newest

    def check(self, weights: Weights, members: Sequence[Member]) -> None:
        """Raise ValueError if names or shapes are not those of the workers' policies."""
        for member in members:
            check_same(member.info.weights, weights)

    def send(
        self, weights: Weights, members: Sequence[Member], version: int, acknowledge: bool = False
    ) -> list[tuple[Member, Any]]:
        """Give weights to these workers; the calls that can be waited for."""
        self._edition += 1
        self.version = version
        self._newest = {name: value.detach().clone() for name, value in weights.items()}
        self._references = {}
        sent = [(member, self.give(member, acknowledge)) for member in members]
        return [(member, call) for member, call in sent if call is not None]

    def give(self, member: Member, acknowledge: bool = False) -> Any:
        """Give one worker the newest weights, if there are any."""
        if self._edition == 0:
            return None
        form = member.info.weights
        if form not in self._references:
            self._references[form] = self._put(self._packed(form))
        member.since_update = 0
        weights = self._references[form]
        return member.handle.assign(self._edition, self.version, weights, acknowledge)

    def _packed(self, form: tuple[Leaf, ...]) -> Buffer:
        """The weights as bytes, in the dtypes that a worker's policy has."""
        if not form:
            return np.empty(0, np.uint8)
        if form not in self._slabs:
            self._slabs[form] = WeightSlab(form)
        return self._slabs[form].pack(self._newest)

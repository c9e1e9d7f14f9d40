"""Links in which a process group of torch.distributed carries the messages."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore

from pycollect.engines.distributed.address import RankAddress
from pycollect.engines.distributed.groups import DRIVER, WORKER, group_of_two
from pycollect.engines.distributed.link import LinkBrokenError, packed, unpacked
from pycollect.engines.messages import Buffer

_HEAD_BYTES = 1024  # of the first message of a value: most have no second one
_HEAD = struct.Struct("<QQ")  # bytes of what follows it, arrays beside it
_SIZE = struct.Struct("<Q")
_FOR_EVER = timedelta(days=10_000)  # a learner may take its time; a death breaks the connection


@dataclass(frozen=True)
class GroupCarrier:
    """Links that are groups of two.

    Attributes:
        backend: of torch.distributed.
    """

    backend: str
    name: ClassVar[str] = "messages"

    def driver_end(self, address: RankAddress) -> GroupLink:
        """The driver's end. Waits for the rank."""
        group = group_of_two(self.backend, address.store(), DRIVER, address.host)
        return GroupLink(group, WORKER)

    def rank_end(self, address: RankAddress, store: PrefixStore) -> GroupLink:
        """The rank's end. Waits for the driver."""
        return GroupLink(group_of_two(self.backend, store, WORKER, address.own_host()), DRIVER)


class GroupSent:
    """The messages of a value, on their way."""

    def __init__(self, works: Sequence[tuple[Any, Any]]) -> None:
        self._works = works

    def wait(self) -> None:
        """Until the other one has it. LinkBrokenError where it never will."""
        for work, _ in self._works:
            _wait(work)


class GroupLink:
    """One end of a group of two: a value is a message, and one for each of its arrays.

    Args:
        group: of torch.distributed.
        peer: the other one's rank.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._head = torch.empty(_HEAD_BYTES, dtype=torch.uint8, device="cpu")

    def send(self, value: Any) -> GroupSent:
        """Send a value, and do not wait."""
        data, arrays = packed(value)
        sizes = b"".join(_SIZE.pack(array.nbytes) for array in arrays)
        whole = bytearray(_HEAD.pack(len(sizes) + len(data), len(arrays)) + sizes + data)
        head, rest = whole[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0"), whole[_HEAD_BYTES:]
        parts: list[Any] = [np.frombuffer(part, np.uint8) for part in (head, rest) if part]
        return GroupSent([self._post(part) for part in (*parts, *arrays) if part.nbytes])

    def _post(self, array: Buffer) -> tuple[Any, Any]:
        tensor = torch.from_numpy(array)
        try:
            return self._group.send([tensor], self._peer, 0), tensor
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error

    def receive(self) -> Any:
        """The next value. Waits."""
        self._fill(self._head)
        head = self._head.numpy()
        length, count = _HEAD.unpack_from(head.data)
        data = np.empty(length, np.uint8)
        here = min(length, _HEAD_BYTES - _HEAD.size)
        data[:here] = head[_HEAD.size : _HEAD.size + here]
        if length > here:
            self._fill(torch.from_numpy(data[here:]))
        sizes = [_SIZE.unpack_from(data.data, place * _SIZE.size)[0] for place in range(count)]
        arrays = [np.empty(size, np.uint8) for size in sizes]
        for array in arrays:
            if array.nbytes:
                self._fill(torch.from_numpy(array))
        return unpacked(data[count * _SIZE.size :].data, arrays)

    def close(self) -> None:
        """The group ends with its last reference, and the other one sees that."""

    def _fill(self, tensor: torch.Tensor) -> None:
        try:
            work = self._group.recv([tensor], self._peer, 0)
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error
        _wait(work)


def _wait(work: Any) -> None:
    try:
        work.wait(_FOR_EVER)
    except RuntimeError as error:
        raise LinkBrokenError(str(error)) from error

"""The host of an inference server answers each call, even after the server has failed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import pytest
import torch
from collect_support import PATIENCE

from pycollect._core import Leaf
from pycollect.data.weights import Weights
from pycollect.transport.hosted import HostedServer
from pycollect.transport.messages import WorkerInfo, WorkerSpec, pickled_spec
from pycollect.transport.serving_host import ServingHost
from pycollect.worker.options import WorkerOptions


class Server(HostedServer):
    """A server that can be configured to fail in its first round."""

    weights: tuple[Leaf, ...] = ()
    device = torch.device("cpu")

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def wait(self) -> None:
        pass

    def serve(self, version: int) -> None:
        if self.fails:
            raise ZeroDivisionError("of the server")

    def policy_client(self, worker: int) -> bytes:
        return bytes([worker])

    def load_weights(self, weights: Weights) -> None:
        pass

    def set_seed(self, seeds: Any, root: int) -> None:
        pass


def hosted(fails: bool = False) -> ServingHost:
    def made(spec: WorkerSpec, policy: bytes) -> Server:
        return Server(fails)

    host = ServingHost()
    spec = WorkerSpec(0, None, None, WorkerOptions(1), team=made)
    info = host.build(False, pickled_spec(spec), cloudpickle.dumps(None))
    assert isinstance(info, WorkerInfo)
    return host


def test_it_is_asked_while_it_serves_and_not_afterwards() -> None:
    host = hosted()
    serving = threading.Thread(target=host.attend)
    serving.start()
    assert host.policy_client(3) == b"\3"
    host.close()
    serving.join(PATIENCE)
    with pytest.raises(RuntimeError, match="closed"):
        host.policy_client(3)


def test_what_has_ended_it_is_told() -> None:
    host = hosted(fails=True)
    with pytest.raises(ZeroDivisionError, match="of the server"):
        host.attend()
    with pytest.raises(ZeroDivisionError, match="of the server"):
        host.policy_client(3)
    with pytest.raises(ZeroDivisionError, match="of the server"):
        host.set_seed([], 0)


def test_who_waits_when_it_ends_is_told() -> None:
    host = hosted()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(host.policy_client, 3)
        host.close()
        host.attend()
        with pytest.raises(RuntimeError, match="closed"):
            asking.result(PATIENCE)

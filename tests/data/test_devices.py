"""Devices of a worker's environment, policy and batches, and their visibility to workers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from collect_support import parity_policy
from echo_envs import echo_fns
from raising import refused

from pycollect.api.arguments import WORKER_ARGUMENTS, check_devices, pickled_policies
from pycollect.api.set_up import WorkerTemplate
from pycollect.data.devices import Devices, why_not
from pycollect.driver.options import RemoteOptions
from pycollect.transport.channel import CallEnd
from pycollect.transport.host import WorkerHost
from pycollect.transport.messages import Build, WorkerInfo
from pycollect.transport.pickling import pickled_spec
from pycollect.transport.ray.engine import actor_options

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("devices", "reported", "batches"),
    [
        (Devices(), None, None),
        (Devices(default=GPU), GPU, GPU),
        (Devices(default=CPU, storing=GPU), GPU, GPU),
        (Devices(default=GPU, storing=CPU), CPU, CPU),
        (Devices(env=GPU), None, GPU),
        (Devices(env=GPU, policy=GPU), GPU, GPU),
        (Devices(env=CPU, policy=GPU), None, CPU),
        (Devices(policy=GPU), None, None),
    ],
    ids=str,
)
def test_devices_of_batches(
    devices: Devices, reported: torch.device | None, batches: torch.device | None
) -> None:
    assert devices.reported == reported
    assert devices.batch_device == batches


def given(**devices: Any) -> dict[str, Any]:
    names = ("device", "storing_device", "env_device", "policy_device")
    return {**dict.fromkeys(names), **devices}


def test_an_actor_may_use_a_device_that_the_driver_lacks() -> None:
    check_devices(given(storing_device="cpu", policy_device="cuda:99"), other_machines=True)
    for name in ("device", "storing_device", "env_device"):
        with refused(ValueError, name):
            check_devices(given(**{name: "cuda:99"}), other_machines=True)
    assert why_not(CPU) == ""


def test_a_worker_process_inherits_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycollect.data.devices.why_not", lambda _: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    named = given(policy_device="cuda", env_device="cuda:0", storing_device="cpu")
    second = torch.device("cuda", 1)
    assert check_devices(named) == Devices(storing=CPU, env=GPU, policy=second)
    # Another machine has its own current device.
    assert check_devices(named, other_machines=True).policy == torch.device("cuda")


@pytest.mark.parametrize(
    ("devices", "config", "gpus"),
    [
        (Devices(storing=GPU), {}, 0),
        (Devices(policy=GPU), {}, 0.2),
        (Devices(default=GPU, storing=CPU), {}, 0.2),
        (Devices(default=GPU), {"num_gpus": 1}, 1),
        (Devices(), {"num_gpus": 0.5}, 0.5),
    ],
    ids=str,
)
def test_actors_that_use_a_gpu_request_a_part_of_it(
    devices: Devices, config: dict[str, Any], gpus: float
) -> None:
    assert actor_options(config, devices)["num_gpus"] == gpus


@pytest.mark.parametrize(
    ("devices", "options", "hidden"),
    [
        (Devices(), {}, False),
        (Devices(storing=GPU), {"num_gpus": 0}, True),
        (Devices(storing=GPU), {"num_gpus": 0.2}, False),
        (Devices(default=CPU, storing=GPU), {}, True),
        (Devices(policy=GPU), {"num_gpus": 0}, False),
    ],
    ids=str,
)
def test_workers_without_a_gpu_do_not_see_it(
    devices: Devices, options: dict[str, Any], hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    arguments = {**dict.fromkeys(WORKER_ARGUMENTS), "reset_at_each_iter": False, "env_groups": 1}
    template = WorkerTemplate({}, (), None, 6, RemoteOptions(sync=True))
    spec = template.spec(0, echo_fns(0), arguments, devices, options, 6, False)
    if devices.worker_types <= {"cpu"}:
        worker = WorkerHost(CallEnd())
        info = worker.answer(
            Build(True, pickled_spec(spec), pickled_policies([parity_policy()], False)[0])
        )
        assert isinstance(info, WorkerInfo)
        assert info.device == CPU
        worker.close()
    assert spec.hides_gpus is hidden
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "0")


def test_a_policy_travels_on_the_cpu() -> None:
    policy = parity_policy()
    data = pickled_policies([policy, policy], False)
    assert data[0] is data[1]

"""Split and n-step of leaves in CUDA memory: one launch of the core's kernel for all of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from pycollect import cuda
from pycollect._core import CudaError, DeviceGather, MultiStepPlan, SplitPlan
from pycollect.batch.layout import Key
from pycollect.batch.tensordicts import is_raw
from pycollect.devices import numbered
from pycollect.errors import warn_user


def on_one_device(leaves: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Those that one launch can read: all that lie on the first CUDA device that is met.

    None where the core has no CUDA, or the driver does not take its kernel; torch's own indexing
    serves what is not among them.
    """
    found: dict[Key, torch.Tensor] = {}
    for key, leaf in leaves.items():
        if leaf.device.type == "cuda" and is_raw(leaf) and cuda.is_torchs():
            first = next(iter(found.values()), leaf)
            if leaf.device == first.device:
                found[key] = leaf.detach()
    device = next((leaf.device for leaf in found.values()), None)
    return {} if device is None or _gather(device.index) is None else found


def prepare(device: torch.device) -> None:
    """Have the driver compile the kernel for that device, so that no batch waits for it.

    Nothing is done where the core has no CUDA.
    """
    if device.type == "cuda" and cuda.is_torchs():
        _gather(numbered(device).index)


def split_on_device(
    plan: SplitPlan, leaves: Mapping[Key, torch.Tensor], lead: tuple[int, ...], ndim: int
) -> dict[Key, torch.Tensor]:
    """The frames of each trajectory, [*lead, *frame], on the current stream of the leaves' device.

    Args:
        leaves: [*batch, *frame] with `ndim` batch dimensions, from `on_one_device`.
        lead: (N, T_max) for the padded form, (F,) for the flat one.
    """
    targets = {key: leaf.new_empty((*lead, *leaf.shape[ndim:])) for key, leaf in leaves.items()}
    gather, workspace, stream = _call(plan, list(targets.values()))
    write = gather.padded if len(lead) == 2 else gather.flat
    write(plan, _with_rows(leaves, ndim), list(targets.values()), workspace, stream)
    return targets


def ahead_on_device(
    plan: MultiStepPlan,
    gamma: float,
    moved: Mapping[Key, torch.Tensor],
    summed: Mapping[Key, torch.Tensor],
    ndim: int,
) -> dict[Key, torch.Tensor]:
    """What each frame of `moved` leads to, and the discounted sums of `summed`; shapes stay.

    Args:
        moved: [*batch, *frame] with `ndim` batch dimensions, from `on_one_device`.
        summed: likewise, on the same device, float32 or float64.
    """
    both = {**moved, **summed}
    targets = {key: leaf.new_empty(leaf.shape) for key, leaf in both.items()}
    gather, workspace, stream = _call(plan, list(targets.values()))
    gather.ahead(
        plan,
        gamma,
        _with_rows(moved, ndim),
        [targets[key] for key in moved],
        _with_rows(summed, ndim),
        [targets[key] for key in summed],
        workspace,
        stream,
    )
    return targets


def _call(
    plan: SplitPlan | MultiStepPlan, targets: Sequence[torch.Tensor]
) -> tuple[DeviceGather, torch.Tensor, int]:
    """The gather of the targets' device, memory for one call, and the current stream.

    The memory is torch's, which gives it to nobody before this stream has done the call.
    """
    device = targets[0].device
    gather = _gather(device.index)
    assert gather is not None, "leaves: expected those that on_one_device returned"
    bytes = sum(target.nbytes for target in targets)
    size = DeviceGather.workspace_bytes(plan, len(targets), bytes)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    return gather, workspace, torch.cuda.current_stream(device).cuda_stream


def _with_rows(leaves: Mapping[Key, torch.Tensor], ndim: int) -> list[torch.Tensor]:
    """As the kernel reads them: contiguous frames in rows at equal distances; copied if need be."""
    result = []
    for leaf in leaves.values():
        if leaf.numel() and not leaf[(0,) * ndim].is_contiguous():
            leaf = leaf.contiguous()
        if ndim > 2:
            leaf = leaf.flatten(0, ndim - 2).view(leaf.shape)
        result.append(leaf)
    return result


@functools.cache
def _gather(device: int) -> DeviceGather | None:
    """One for the whole process: the driver compiles the kernel when it is made.

    None where it does not, as for a device or a driver that is too old, which is warned of once.
    """
    try:
        return DeviceGather(device)
    except CudaError as error:
        warn_user(f"trajectories on cuda:{device} are put together by torch's indexing: {error}")
        return None

"""Split batches and sum n-step rewards on CUDA, with one kernel launch for all tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from pycollect import cuda
from pycollect._core import CudaError, DeviceGather, MultiStepPlan, SplitPlan
from pycollect.data.devices import with_index
from pycollect.data.layout import Key
from pycollect.data.tensordicts import is_raw
from pycollect.errors import warn_user


def on_one_device(leaves: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Return the entries that one launch can read: those on the first CUDA device found.

    The result is empty if the core has no CUDA or the driver rejects its kernel. torch indexing
    processes all other entries.
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
    """Compile the device's kernel now, so that no batch waits for it.

    Do nothing if the core has no CUDA.
    """
    if device.type == "cuda" and cuda.is_torchs():
        _gather(with_index(device).index)


def split_on_device(
    plan: SplitPlan, leaves: Mapping[Key, torch.Tensor], lead: tuple[int, ...], ndim: int
) -> dict[Key, torch.Tensor]:
    """Return the frames of each trajectory, [*lead, *frame], on the current stream.

    Args:
        leaves: [*batch, *frame] with `ndim` batch dimensions, from `on_one_device`.
        lead: (N, T_max) for the padded layout, (F,) for the flat one.
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
    """Return the target frame of each frame of `moved`, and discounted sums of `summed`."""
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
    """Return the targets' gather, memory for one call, and the current stream.

    torch does not reuse the memory until this stream has executed the call.
    """
    device = targets[0].device
    gather = _gather(device.index)
    assert gather is not None, "leaves: expected those that on_one_device returned"
    bytes = sum(target.nbytes for target in targets)
    size = DeviceGather.workspace_bytes(plan, len(targets), bytes)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    return gather, workspace, torch.cuda.current_stream(device).cuda_stream


def _with_rows(leaves: Mapping[Key, torch.Tensor], ndim: int) -> list[torch.Tensor]:
    """Return tensors with contiguous frames in equally spaced rows; copy if necessary."""
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
    """Return the process-wide gather of a device, for which the driver compiles the kernel.

    Return ``None``, with one warning, if the device or driver is too old.
    """
    try:
        return DeviceGather(device)
    except CudaError as error:
        warn_user(
            f"trajectories on cuda:{device} are processed by torch indexing, which is slower; the "
            f"compiled kernel is not available: {error}"
        )
        return None

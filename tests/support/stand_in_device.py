"""A torch device with memory distinct from the CPU's, like a GPU's; it needs no GPU.

Load it as a pytest plugin (`-p stand_in_device`) to run the GPU tests on it. An operation that
mixes its tensors with CPU tensors raises, with the same exemptions as CUDA. The host stores the
values and runs the operations. The device has no streams and no random generator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "standin"

# Operations that accept tensors of both devices: copies, and indexing with CPU indices.
_COPIES = ("aten::_copy_from", "aten::_to_copy", "aten::copy_")
_INDEXING = ("aten::_index_put_impl_", "aten::_unsafe_index", "aten::index", "aten::index_put_")


class Tensor(torch.Tensor):
    """A tensor on the device; the private `host` tensor stores its values."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Tensor:
        tensor: Tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.host = host
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _called(op, *args, **(kwargs or {}))

    def tolist(self) -> Any:
        return self.host.tolist()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()


class _Module(backend_registration._DummyBackendModule):
    """Module `torch.standin`."""

    def synchronize(self, device: Any = None) -> None:
        """Return immediately, because operations are synchronous."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()  # the host's generator draws all numbers

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def _called(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the host's values."""
    name = op._schema.name
    if name == "aten::_local_scalar_dense":
        return args[0].host.item()
    if name not in _COPIES:
        given = [own for own in tree_leaves((args, kwargs)) if isinstance(own, torch.Tensor)]
        for own in given[:1] if name in _INDEXING else given:
            if not isinstance(own, Tensor) and own.dim():
                raise RuntimeError(f"{name}: expected tensors on {NAME}, got one on {own.device}")
    wanted = kwargs.get("device")
    known: dict[int, Tensor] = {}  # in-place operations return their argument

    def to_host(value: Any) -> Any:
        if isinstance(value, Tensor):
            known[id(value.host)] = value
            return value.host
        is_ours = isinstance(value, torch.device) and value.type == NAME
        return torch.device("cpu") if is_ours else value

    def from_host(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else Tensor(value)

    result = op(*tree_map(to_host, args), **tree_map(to_host, kwargs))
    return result if wanted is not None and wanted.type == "cpu" else tree_map(from_host, result)


def _copied(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    """Copy between the CPU and the device, or within the device."""
    hosts = [own.host if isinstance(own, Tensor) else own for own in (target, source)]
    hosts[0].copy_(hosts[1])
    return target


def _empty(size: Any, **options: Any) -> torch.Tensor:
    return Tensor(torch.empty(size, dtype=options.get("dtype"), device="cpu"))


def _empty_strided(size: Any, stride: Any, **options: Any) -> torch.Tensor:
    return Tensor(torch.empty_strided(size, stride, dtype=options.get("dtype"), device="cpu"))


backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
_others = torch.library.Library("_", "IMPL", "PrivateUse1")
_others.fallback(_called, "PrivateUse1")
_own = torch.library.Library("aten", "IMPL", "PrivateUse1")
_own.impl("empty.memory_format", _empty)
_own.impl("empty_strided", _empty_strided)
_own.impl("_copy_from", _copied)

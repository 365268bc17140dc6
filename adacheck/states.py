"""A state in memory: one parameter with its optimizer tensors (or one buffer), and how tensors become bytes and back.

This is the unit of every decision. The trainer has live states, the keeper has shadows; both are `State`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from adacheck.digest import state_digest, tensor_digest_of_bytes
from adacheck.errors import UnsupportedTensor
from adacheck.manifests.record import SEGMENT_BYTES_MAX, StateSpec, TensorSpec

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the prefix: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype called `name`.

    Raises:
        UnsupportedTensor: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedTensor(f"this torch ({torch.__version__}) has no dtype {name!r}; restore with the version that saved it")
    return dtype


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, without a copy: flat, format `B`, writable. Empty for no elements."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "only contiguous CPU tensors have bytes to view"
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat = tensor.detach().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    return flat.view(torch.uint8).numpy().data


def local_tensor(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The plain tensor this rank holds: itself, or the local part of a DTensor.

    Raises:
        UnsupportedTensor: a subclass this project does not know; silently reading it could lose part of it. `what` names it.
    """
    if type(tensor) in _PLAIN:
        return tensor.detach()
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None and type(tensor).__module__.startswith("torch.distributed"):
        local: torch.Tensor = to_local()
        return local.detach()
    if isinstance(tensor, torch.nn.Parameter):
        return tensor.detach()
    raise UnsupportedTensor(f"{what} is a {type(tensor).__name__}, which adacheck does not know how to store; keep it out of the model")


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe a tensor that this rank holds whole."""
    shape = tuple(tensor.shape)
    return TensorSpec(name, dtype_name(tensor.dtype), shape, shape, (0,) * len(shape))


def spec_bytes(spec: TensorSpec) -> int:
    """Size of a tensor in bytes."""
    count = 1
    for size in spec.shape:
        count *= size
    return count * dtype_of(spec.dtype).itemsize


def segment_ranges(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    """Element ranges of a tensor's canonical segments: a cut at every `SEGMENT_BYTES_MAX` bytes. None for no elements."""
    itemsize = dtype_of(spec.dtype).itemsize
    elements, step = spec_bytes(spec) // itemsize, SEGMENT_BYTES_MAX // itemsize
    for start in range(0, elements, step):
        yield start, min(start + step, elements)


@dataclass
class State:
    """A state with its bytes: `tensors` in the order of `spec.tensors`, contiguous, on CPU (shadow) or where the trainer has them.

    Attributes:
        spec: what it is.
        tensors: name -> tensor.
        scalars: the optimizer's entries that are no tensors, decoded from `spec.scalars`.
    """

    spec: StateSpec
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, Any]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec_bytes(t) for t in self.spec.tensors)

    def digest(self) -> bytes:
        """`state_digest` of the present bytes; reads all of them."""
        return state_digest(self.spec, [tensor_digest_of_bytes(tensor_bytes(self.tensors[t.name])) for t in self.spec.tensors])


def allocate(spec: StateSpec) -> dict[str, torch.Tensor]:
    """Fresh CPU tensors for every tensor of a state, contents undefined until filled."""
    return {t.name: torch.empty(t.shape, dtype=dtype_of(t.dtype)) for t in spec.tensors}

"""A state in memory: one parameter with its optimizer tensors (or one buffer), and how tensors become bytes and back.

This is the unit of every decision. The trainer has live states, the keeper has shadows; both are `State`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from adacheck.digest import state_digest, tensor_digest_of_bytes
from adacheck.errors import UnsupportedTensor
from adacheck.manifests.record import SEGMENT_BYTES_MAX, StateSpec, TensorSpec

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PARTS_OF_BYTES = frozenset(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8))
_OVERRIDES = {"__torch_dispatch__", "__torch_function__", "__new__", "__tensor_flatten__", "detach", "data"}


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
    return flat_bytes(tensor).numpy().data


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as a flat tensor of `uint8`: the same memory if they lie there so, else a copy."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.numel() < 2:
        flat = flat.as_strided((flat.numel(),), (1,))  # a slice of one element keeps its stride, and torch will not view it as bytes
    return flat.contiguous().view(torch.uint8)


def local_tensor(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The plain tensor this rank holds: itself, or the local part of a DTensor.

    Raises:
        UnsupportedTensor: there is more to it than dense bytes (`unstorable`), or it is of a subclass this project does not know;
            silently reading it could lose part of it. `what` names it.
    """
    if type(tensor) in _PLAIN:
        if tensor.layout is torch.strided and not tensor.is_quantized:
            return tensor.detach()
    elif _is_distributed(tensor):
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return local.detach()
    refuse_unstorable(tensor, what)
    return tensor.detach()


def refuse_unstorable(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor of which the bytes of its elements are not all there is; `what` names it.

    Raises:
        UnsupportedTensor: says of what kind it is, and what to do.
    """
    if (problem := unstorable(tensor)) is not None:
        raise UnsupportedTensor(f"{what} {problem}")


def unstorable(tensor: torch.Tensor) -> str | None:
    """What besides the bytes of its elements makes up this tensor, as the end of a sentence; `None` if nothing does."""
    if _is_distributed(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    kind = type(tensor)
    if is_lazy(tensor):
        return "is lazy and has no shape yet; run one batch through the model before store.attach"
    if kind not in _PLAIN and not _only_a_name(tensor):
        return f"is a {kind.__module__}.{kind.__qualname__}, which adacheck does not know how to store; keep it out of the model"
    if tensor.device.type == "meta":
        return "is a meta tensor without bytes; materialise the model before store.attach"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"is a {'nested' if tensor.is_nested else tensor.layout} tensor, and only dense ones can be stored; make it dense"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}): its scales are not among its bytes; store int_repr() and the scales as buffers"
    if tensor.dtype in _PARTS_OF_BYTES and not tensor.is_contiguous():
        return f"has elements of {tensor.dtype} that do not lie in row-major order, which torch cannot copy; make it contiguous"
    return None


def _is_distributed(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local") and type(tensor).__module__.startswith("torch.distributed")


def _only_a_name(tensor: torch.Tensor) -> bool:
    """Whether a subclass of `Parameter` changes nothing that torch does with it, and this instance carries nothing besides its bytes."""
    kind = type(tensor)
    if not issubclass(kind, torch.nn.Parameter) or vars(tensor):
        return False
    overridden = [cls for cls in kind.__mro__[: kind.__mro__.index(torch.nn.Parameter)] if vars(cls).keys() & _OVERRIDES]
    return not overridden


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
    return {t.name: empty(t.shape, dtype_of(t.dtype)) for t in spec.tensors}


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in host memory, contents undefined, whatever the default device; made of bytes, which no dtype warns about."""
    return torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype).view(tuple(shape))

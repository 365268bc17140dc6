"""Opaque items (`extra`, RNG, hyperparameters) as msgpack: what comes back has the same types and bits, or is refused by name.

Plain values are plain msgpack; what msgpack has no form for (tuples, tensors, large integers, ...) is an extension type of
`_Code`, whose payload is msgpack again. No pickle, and nothing in the bytes can name a class or a function to call.
"""

from __future__ import annotations

import collections
import io
import math
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import msgpack
import numpy
import torch

from adacheck.errors import DamagedCut, UnsupportedTensor
from adacheck.states import dtype_name, dtype_of, empty, tensor_bytes

DEPTH_MAX = 64
"""Most levels of nesting, out and in: each level of decoding takes some 40 KiB of the C stack."""

_ELEMENTS_MAX = 2**59  # beyond, the strides even of an empty tensor overflow
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_FACTORIES: dict[str, Callable[[], Any] | None] = {"": None}
_FACTORIES |= {factory.__name__: factory for factory in (int, float, bool, str, bytes, list, dict, set, tuple)}
_NUMPY_KINDS = "biufcSUmM"


class _Code(IntEnum):
    """Extension types; a number never changes its meaning."""

    INTEGER = 1
    COMPLEX = 2
    TUPLE = 3
    SET = 4
    FROZENSET = 5
    DEQUE = 6
    ORDERED_DICT = 7
    DEFAULT_DICT = 8
    TENSOR = 9
    ARRAY = 10
    NUMPY_SCALAR = 11
    SIZE = 12
    DTYPE = 13
    DEVICE = 14
    BYTEARRAY = 15
    BYTES_IO = 16


def encode(name: str, value: object) -> bytes:
    """The bytes of one opaque item; equal values give equal bytes on every rank (dicts in their order, sets sorted).

    Kept: None, bool, int of any size, float and complex to the bit, str, bytes, bytearray, BytesIO, list, tuple, set, frozenset, dict,
    OrderedDict, deque, defaultdict of a built-in type, dense tensors (a Parameter as a Tensor), numpy arrays and scalars,
    torch.Size, dtype and device. Not kept: the device and strides of a tensor, and which objects are the same object.

    Raises:
        UnsupportedTensor: anything else; the message has the path from `name` (`extra.loader.foo[3]`) and the type.
    """
    return _pack(_plain(value, name, 0), name)


def decode(content: bytes | memoryview) -> Any:
    """The value that `encode` wrote; tensors are on the CPU.

    Raises:
        DamagedCut: the bytes are not what `encode` writes, whatever else they are.
    """
    try:
        return _unpack(content, 0)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, MemoryError, RuntimeError, struct.error) as error:
        raise DamagedCut(f"{len(content)} bytes are no opaque item ({type(error).__name__}: {error}); use another copy or cut") from error


def _pack(plain: Any, path: str) -> bytes:
    try:
        packed: bytes = msgpack.packb(plain, default=_large_integer, strict_types=True, unicode_errors="surrogatepass")
    except (ValueError, OverflowError) as error:
        raise UnsupportedTensor(f"{path} cannot be stored: {error}; keep tensors of this size in the model or the optimizer") from error
    return packed


def _large_integer(value: int) -> msgpack.ExtType:
    return msgpack.ExtType(_Code.INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _plain(value: Any, path: str, depth: int) -> Any:
    """`value` in msgpack's own types and `ExtType`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth >= DEPTH_MAX:
        raise UnsupportedTensor(f"{path} is nested more than {DEPTH_MAX} levels deep (or contains itself); flatten it")
    if kind is list:
        return _plain_items(value, path, depth)
    if kind is dict:
        return _plain_dict(value, path, depth)
    write = _WRITERS.get(kind)
    if write is not None:
        return write(value, path, depth)
    if isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
        return _extension(_Code.NUMPY_SCALAR, [value.dtype.str, value.tobytes()], path)
    raise UnsupportedTensor(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored without loss; "
        "let state_dict() (or get_extra_state()) return numbers, strings, bytes, tensors, arrays and containers of them"
    )


def _extension(code: _Code, payload: Any, path: str) -> msgpack.ExtType:
    return msgpack.ExtType(code, _pack(payload, path))


def _plain_items(values: Sequence[Any], path: str, depth: int) -> list[Any]:
    if _PLAIN.issuperset(map(type, values)):  # the 625 integers of Python's generator, every step
        return list(values)
    return [_plain(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(values)]


def _plain_dict(value: dict[Any, Any], path: str, depth: int) -> dict[Any, Any]:
    plain: dict[Any, Any] = {}
    for key, item in value.items():
        inner = f"{path}.{key}" if type(key) is str else f"{path}[{key!r}]"
        plain[_plain_key(key, inner, depth + 1)] = _plain(item, inner, depth + 1)
    return plain


def _plain_key(key: Any, path: str, depth: int) -> Any:
    if type(key) in _PLAIN:
        return key
    if type(key) not in (tuple, complex, torch.dtype, torch.device):
        raise UnsupportedTensor(f"{path} has a key of type {type(key).__qualname__}; use strings, numbers, or tuples of them")
    if type(key) is tuple:
        for item in key:
            _plain_key(item, path, depth + 1)
    return _plain(key, path, depth)


def _items(code: _Code) -> Callable[[Any, str, int], msgpack.ExtType]:
    return lambda value, path, depth: _extension(code, _plain_items(value, path, depth), path)


def _set(code: _Code) -> Callable[[Any, str, int], msgpack.ExtType]:
    def write(value: Any, path: str, depth: int) -> msgpack.ExtType:
        packed = sorted(_pack(_plain_key(item, f"{path}{{{item!r}}}", depth + 1), path) for item in value)
        return _extension(code, packed, path)

    return write


def _deque(value: Any, path: str, depth: int) -> msgpack.ExtType:
    return _extension(_Code.DEQUE, [value.maxlen, _plain_items(value, path, depth)], path)


def _default_dict(value: Any, path: str, depth: int) -> msgpack.ExtType:
    factory = value.default_factory
    name = "" if factory is None else getattr(factory, "__name__", "?")
    if name not in _FACTORIES or _FACTORIES[name] is not factory:
        raise UnsupportedTensor(f"{path} is a defaultdict of {factory!r}, which is no built-in type; return dict(...) of it instead")
    return _extension(_Code.DEFAULT_DICT, [name, _plain_dict(value, path, depth)], path)


def _tensor(value: torch.Tensor, path: str, depth: int) -> msgpack.ExtType:
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        raise UnsupportedTensor(f"{path} is a {value.layout} {value.dtype} tensor on {value.device}; only dense tensors can be stored")
    whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return _extension(_Code.TENSOR, [dtype_name(value.dtype), list(value.shape), tensor_bytes(whole).tobytes()], path)


def _array(value: Any, path: str, depth: int) -> msgpack.ExtType:
    if value.dtype.kind not in _NUMPY_KINDS:
        raise UnsupportedTensor(f"{path} is an array of dtype {value.dtype}; only numbers, booleans, times and plain text can be stored")
    return _extension(_Code.ARRAY, [value.dtype.str, list(value.shape), value.tobytes()], path)


_WRITERS: dict[type, Callable[[Any, str, int], msgpack.ExtType]] = {
    complex: lambda value, path, depth: msgpack.ExtType(_Code.COMPLEX, struct.pack("<dd", value.real, value.imag)),
    bytearray: lambda value, path, depth: msgpack.ExtType(_Code.BYTEARRAY, bytes(value)),
    io.BytesIO: lambda value, path, depth: _extension(_Code.BYTES_IO, [value.getvalue(), value.tell()], path),
    tuple: _items(_Code.TUPLE),
    set: _set(_Code.SET),
    frozenset: _set(_Code.FROZENSET),
    collections.deque: _deque,
    collections.OrderedDict: lambda value, path, depth: _extension(_Code.ORDERED_DICT, _plain_dict(value, path, depth), path),
    collections.defaultdict: _default_dict,
    numpy.ndarray: _array,
    torch.Size: lambda value, path, depth: _extension(_Code.SIZE, list(value), path),
    torch.dtype: lambda value, path, depth: _extension(_Code.DTYPE, dtype_name(value), path),
    torch.device: lambda value, path, depth: _extension(_Code.DEVICE, str(value), path),
    **dict.fromkeys(_TENSORS, _tensor),
}


def _unpack(content: bytes | memoryview, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise ValueError(f"nested more than {DEPTH_MAX} levels deep")
    return msgpack.unpackb(
        content,
        strict_map_key=False,
        unicode_errors="surrogatepass",
        ext_hook=lambda code, payload: _READERS[_Code(code)](payload, depth + 1),
    )


def _read_items(make: Callable[[Any], Any]) -> Callable[[bytes, int], Any]:
    return lambda payload, depth: make(_list(_unpack(payload, depth)))


def _read_set(make: Callable[[Any], Any]) -> Callable[[bytes, int], Any]:
    return lambda payload, depth: make(_unpack(item, depth + 1) for item in _list(_unpack(payload, depth)))


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{type(value).__name__} where a list belongs")
    return value


def _read_complex(payload: bytes, depth: int) -> complex:
    return complex(*struct.unpack("<dd", payload))


def _read_deque(payload: bytes, depth: int) -> Any:
    maxlen, items = _unpack(payload, depth)
    return collections.deque(_list(items), maxlen)


def _read_ordered(payload: bytes, depth: int) -> Any:
    return collections.OrderedDict(_unpack(payload, depth))


def _read_default(payload: bytes, depth: int) -> Any:
    name, items = _unpack(payload, depth)
    return collections.defaultdict(_FACTORIES[name], items)


def _read_tensor(payload: bytes, depth: int) -> torch.Tensor:
    name, shape, content = _unpack(payload, depth)
    dtype = dtype_of(name)
    if not all(type(size) is int and size >= 0 for size in _list(shape)) or math.prod(filter(None, shape)) > _ELEMENTS_MAX:
        raise ValueError(f"a tensor of shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes for a {name} tensor of shape {shape}")
    tensor = empty(shape, dtype)
    tensor_bytes(tensor)[:] = content
    return tensor


def _numpy_dtype(text: Any) -> Any:
    dtype = numpy.dtype(text) if type(text) is str else None
    if dtype is None or dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {text!r}")
    return dtype


def _read_array(payload: bytes, depth: int) -> Any:
    text, shape, content = _unpack(payload, depth)
    dtype = _numpy_dtype(text)
    if dtype.itemsize == 0:  # '<U0', '|S0': elements without bytes
        if numpy.prod(shape, dtype=object) > len(payload):
            raise ValueError(f"an array of shape {shape} in {len(payload)} bytes")
        return numpy.empty(shape, dtype)
    return numpy.frombuffer(content, dtype).reshape(_list(shape)).copy()


def _read_numpy_scalar(payload: bytes, depth: int) -> Any:
    text, content = _unpack(payload, depth)
    dtype = _numpy_dtype(text)
    return (numpy.frombuffer(content, dtype) if dtype.itemsize else numpy.empty(1, dtype)).reshape(())[()]


def _read_bytes_io(payload: bytes, depth: int) -> io.BytesIO:
    content, at = _unpack(payload, depth)
    buffer = io.BytesIO(content)
    buffer.seek(at)
    return buffer


def _read_size(payload: bytes, depth: int) -> torch.Size:
    return torch.Size(_list(_unpack(payload, depth)))


def _read_dtype(payload: bytes, depth: int) -> torch.dtype:
    return dtype_of(_unpack(payload, depth))


_READERS: dict[_Code, Callable[[bytes, int], Any]] = {
    _Code.INTEGER: lambda payload, depth: int.from_bytes(payload, "little", signed=True),
    _Code.COMPLEX: _read_complex,
    _Code.BYTEARRAY: lambda payload, depth: bytearray(payload),
    _Code.BYTES_IO: _read_bytes_io,
    _Code.TUPLE: _read_items(tuple),
    _Code.SET: _read_set(set),
    _Code.FROZENSET: _read_set(frozenset),
    _Code.DEQUE: _read_deque,
    _Code.ORDERED_DICT: _read_ordered,
    _Code.DEFAULT_DICT: _read_default,
    _Code.TENSOR: _read_tensor,
    _Code.ARRAY: _read_array,
    _Code.NUMPY_SCALAR: _read_numpy_scalar,
    _Code.SIZE: _read_size,
    _Code.DTYPE: _read_dtype,
    _Code.DEVICE: lambda payload, depth: torch.device(_unpack(payload, depth)),
}

"""Byte layout of one shard of a full checkpoint: a safetensors file that stock PyTorch's `HuggingFaceStorageReader` loads.

The header needs only specs, so a shard is written as a stream; it is parsed here too, because the library's own reader wants a
local file. Pure, and without torch.

A dtype that not every safetensors release has a code for (complex, float4, some float8) is stored as `U8` with the last dimension
multiplied by the element size, and its name is noted in the metadata: stock readers then load its bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from adacheck.errors import DamagedCut
from adacheck.manifests.record import TensorSpec

HEADER_BYTES_MAX = 100_000_000
"""Largest header that safetensors itself accepts."""

LENGTH_BYTES = 8
"""The file begins with the header's length, a little-endian 64-bit number."""

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
}
_SHARDING, _DTYPES, _ALIASES = "DCP_SHARDING_INFO", "ADACHECK_DTYPES", "ADACHECK_ALIASES"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a shard: its key in the file, what it is, the bytes of one element, and further names of a tied parameter."""

    key: str
    spec: TensorSpec
    element_bytes: int
    aliases: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return prod(self.spec.shape) * self.element_bytes


def header(entries: Sequence[Entry]) -> bytes:
    """Everything before the tensors' bytes, which follow in the order of `entries` without gaps.

    The widest elements must come first, so that every tensor is aligned: `sorted(..., key=lambda e: -e.element_bytes)`.
    """
    described: dict[str, Any] = {}
    sharding: dict[str, Any] = {}
    at = 0
    for entry in entries:
        shape, offsets = _stored(entry, entry.spec.shape), _stored(entry, entry.spec.offsets)
        if not entry.spec.shape and entry.spec.dtype not in _CODES:
            offsets = [0]
        code = _CODES.get(entry.spec.dtype, "U8")
        described[entry.key] = {"dtype": code, "shape": shape, "data_offsets": [at, at + entry.size_bytes]}
        sharding[entry.key] = {"saved_offsets": offsets}
        at += entry.size_bytes
    metadata = {"format": "pt", "DCP_VERSION": "1.0", _SHARDING: json.dumps(sharding)}
    metadata |= _table(_DTYPES, {e.key: e.spec.dtype for e in entries if e.spec.dtype not in _CODES})
    metadata |= _table(_ALIASES, {e.key: list(e.aliases) for e in entries if e.aliases})
    text = json.dumps({"__metadata__": metadata, **described}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _stored(entry: Entry, sizes: tuple[int, ...]) -> list[int]:
    """A shape, or offsets, as the file has them."""
    if entry.spec.dtype in _CODES:
        return list(sizes)
    return [*sizes[:-1], sizes[-1] * entry.element_bytes] if sizes else [entry.element_bytes]


def _table(name: str, table: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(table)} if table else {}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of one tensor are in the file: a half-open range from its beginning."""

    start: int
    stop: int


def header_bytes(beginning: bytes) -> int:
    """Length of everything before the tensors' bytes, from the first `LENGTH_BYTES` of a file.

    Raises:
        DamagedCut: too short, or a length that no safetensors file has.
    """
    if len(beginning) < LENGTH_BYTES:
        raise DamagedCut(f"the file has only {len(beginning)} bytes")
    (length,) = struct.unpack_from("<Q", beginning)
    if length > HEADER_BYTES_MAX:
        raise DamagedCut(f"the header claims {length} bytes")
    return LENGTH_BYTES + int(length)


def places(content: bytes) -> dict[str, Place]:
    """Where each tensor is, from the `header_bytes` first bytes of a file. Only hints: digests decide what the bytes are worth.

    Raises:
        DamagedCut: this is no safetensors header.
    """
    try:
        described = json.loads(content[LENGTH_BYTES:])
        ranges = {key: value["data_offsets"] for key, value in described.items() if key != "__metadata__"}
        found = {key: Place(len(content) + start, len(content) + stop) for key, (start, stop) in ranges.items()}
        if not all(len(content) <= place.start <= place.stop for place in found.values()):
            raise ValueError("a tensor ends before it begins")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCut(f"the header is not safetensors: {type(error).__name__}: {error}") from error
    return found

"""Bytes of a record, and back: one envelope for all records, so that damage is told apart before any field is looked at.

    magic (8) | format version (2) | kind (2) | payload length (4) | payload, msgpack | BLAKE3-256 of all before (32)

Integers are little-endian. The payload is a map of the record's fields in the order of `record.py`; every value is checked
against the field's annotation on the way out and on the way in. A record has exactly one encoding. See FORMAT.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import blake3
import msgpack

from adacheck.manifests.errors import BitFlip, Malformed, NewerFormat, NotARecord, Truncated, WrongRecord, ZeroLength
from adacheck.manifests.record import (
    DIGEST_BYTES,
    Base,
    Chain,
    Fork,
    Full,
    HistoryChunk,
    Incarnation,
    Increment,
    Linked,
    Record,
    Run,
    Version,
)

MAGIC = b"\x89ADACHK\n"
"""First bytes of every record: not text, and changed by any translation of line ends."""

FORMAT_VERSION = 1
"""Version of the payloads. The header and the checksum stay as they are in every later version."""

KINDS: dict[int, type[Any]] = {
    1: Run,
    2: Incarnation,
    3: Fork,
    4: Version,
    5: Full,
    6: Chain,
    7: Base,
    8: Increment,
    9: Linked,
    10: HistoryChunk,
}
"""Kind number in the envelope -> class. A number is never given to another class."""

R = TypeVar("R", bound=Record)
Buffer = bytes | bytearray | memoryview
_Convert = Callable[[Any], Any]

_HEADER = struct.Struct("<8sHHI")
_NUMBERS = {cls: number for number, cls in KINDS.items()}
_SCALARS = (int, str, bytes, bool, float)
_ARRAY_LENGTH_MAX = 1 << 20
_MAP_LENGTH_MAX = 64


def encode(record: Record) -> bytes:
    """The bytes of a record, the same for equal records.

    Raises:
        Malformed: a field has a value that its annotation does not allow, an integer over 64 bits, or text that is not Unicode.
    """
    number = _NUMBERS.get(type(record))
    if number is None:
        raise Malformed(f"a {type(record).__name__} is not stored as a record of its own; records are {_names()}")
    write, _ = _converters(cast(Any, type(record)))
    try:
        payload = msgpack.packb(write(record))
        body: bytes = _HEADER.pack(MAGIC, FORMAT_VERSION, number, len(payload)) + payload
    except (ValueError, OverflowError, struct.error) as error:
        if isinstance(error, Malformed):
            raise
        raise Malformed(f"{type(record).__name__} cannot be encoded: {error}") from error
    return body + _checksum(body)


def decode(content: Buffer, kind: type[R]) -> R:
    """The record of class `kind` in `content`; whatever the bytes are, only errors of this layer are raised.

    Raises:
        ZeroLength, Truncated, NotARecord, BitFlip: damaged, in that manner.
        NewerFormat: undamaged, written by a later release.
        WrongRecord: undamaged, and of another kind.
        Malformed: undamaged, but not what this format version allows.
    """
    view = memoryview(content)
    number = _check_envelope(view)
    found = KINDS.get(number)
    if found is not kind:
        what = f"a {found.__name__} record" if found else f"a record of unknown kind {number}"
        raise WrongRecord(f"{what} where a {kind.__name__} record belongs")
    payload = view[_HEADER.size : -DIGEST_BYTES]
    value = _unpack(payload, kind)
    _, read = _converters(cast(Any, kind))
    record: R = read(value)
    if msgpack.packb(value) != payload:
        raise Malformed(f"{kind.__name__} is not in its one encoding: a field is doubled, or a value has a longer form than it needs")
    return record


def split(content: Buffer) -> Iterator[memoryview]:
    """The records of an object that holds several one after the other, not decoded; what is left if one's length cannot be right."""
    view = memoryview(content)
    while view:
        size = len(view)
        if size >= _HEADER.size:
            size = min(size, _HEADER.size + _HEADER.unpack_from(view)[3] + DIGEST_BYTES)
        yield view[:size]
        view = view[size:]


def _check_envelope(view: memoryview) -> int:
    """Check everything around the payload; returns the kind number."""
    if not view:
        raise ZeroLength("the object has no bytes")
    known = min(len(view), len(MAGIC))
    if len(view) < _HEADER.size + DIGEST_BYTES:
        if view[:known] != MAGIC[:known]:
            raise NotARecord(f"the object begins with {bytes(view[:8])!r}, a record begins with {MAGIC!r}")
        raise Truncated(f"the object has {len(view)} bytes, the shortest record has {_HEADER.size + DIGEST_BYTES}")
    magic, version, number, length = _HEADER.unpack_from(view)
    if _checksum(view[:-DIGEST_BYTES]) != view[-DIGEST_BYTES:]:
        raise _damage(view, magic, version, number, length)
    if magic != MAGIC:
        raise NotARecord(f"the object begins with {magic!r}, a record begins with {MAGIC!r}")
    if version > FORMAT_VERSION:
        raise NewerFormat(version, FORMAT_VERSION)
    if version < 1 or length != len(view) - _HEADER.size - DIGEST_BYTES:
        raise Malformed(f"the header says format version {version} and {length} payload bytes, the object has {len(view)} bytes")
    return int(number)


def _damage(view: memoryview, magic: bytes, version: int, number: int, length: int) -> Exception:
    """What happened to an object that does not match its checksum."""
    size = _HEADER.size + length + DIGEST_BYTES
    actual = len(view) - _HEADER.size - DIGEST_BYTES
    # A flip in the magic or in the length would look like a foreign or a short object: see whether the checksum fits without it.
    if (magic, length) != (MAGIC, actual) and actual < 1 << 32:
        mended = _HEADER.pack(MAGIC, version, number, actual)
        if blake3.blake3(mended).update(view[_HEADER.size : -DIGEST_BYTES]).digest() == view[-DIGEST_BYTES:]:
            return BitFlip("the header is damaged: the checksum fits with another magic or length")
    if magic != MAGIC:
        return NotARecord(f"the object begins with {magic!r}, a record begins with {MAGIC!r}")
    if len(view) < size:
        return Truncated(f"the object has {len(view)} bytes, its record has {size}")
    return BitFlip(f"the bytes do not match their checksum (the object has {len(view)} bytes, its record has {size})")


def _unpack(payload: memoryview, kind: type[Any]) -> Any:
    """Untyped content of a payload. Lists, not tuples: a declared length then costs no memory before its elements are there."""
    try:
        return msgpack.unpackb(
            payload,
            use_list=True,
            raw=False,
            strict_map_key=True,
            max_str_len=len(payload),
            max_bin_len=len(payload),
            max_array_len=min(len(payload), _ARRAY_LENGTH_MAX),
            max_map_len=_MAP_LENGTH_MAX,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed(f"the payload of a {kind.__name__} record is not msgpack of its fields: {type(error).__name__}: {error}") from error


def _checksum(content: Buffer) -> bytes:
    return blake3.blake3(content).digest()


def _names() -> str:
    return ", ".join(cls.__name__ for cls in KINDS.values())


@cache
def _converters(cls: Any) -> tuple[_Convert, _Convert]:
    """Functions from a record of class `cls` to plain values and back, made once from its annotations."""
    hints = get_type_hints(cls)
    names = tuple(field.name for field in fields(cls))
    pairs = [_field_converters(hints[name], f"{cls.__name__}.{name}") for name in names]
    writes = tuple((name, write) for name, (write, _) in zip(names, pairs, strict=True))
    reads = tuple(read for _, read in pairs)
    types = tuple(hints[name] for name in names)

    def to_plain(value: Any) -> dict[str, Any]:
        if type(value) is not cls:
            raise Malformed(f"a {type(value).__name__} where a {cls.__name__} belongs")
        return {name: write(getattr(value, name)) for name, write in writes}

    def from_plain(value: Any) -> Any:
        if type(value) is not dict:
            raise Malformed(f"a {type(value).__name__} where the fields of a {cls.__name__} belong")
        if tuple(value) != names:
            raise Malformed(_wrong_fields(cls.__name__, names, tuple(value)))
        if tuple(map(type, value.values())) == types:  # only scalars, as in a segment, of which an increment has hundreds
            return cls(*value.values())
        return cls(*[read(item) for read, item in zip(reads, value.values(), strict=True)])

    return to_plain, from_plain


def _wrong_fields(name: str, expected: tuple[str, ...], found: tuple[Any, ...]) -> str:
    missing = [field for field in expected if field not in found]
    unknown = [field for field in found if field not in expected]
    return f"{name} has its fields wrong: missing {missing}, unknown {unknown}" + ("" if missing or unknown else ", in another order")


def _field_converters(annotation: Any, where: str) -> tuple[_Convert, _Convert]:
    """The pair of functions for one field: `where` is its name in messages."""
    if get_origin(annotation) is tuple:
        return _tuple_converters(get_args(annotation)[0], where)
    if is_dataclass(annotation):
        assert isinstance(annotation, type)
        return _converters(annotation)
    check = _scalar_check(annotation, where)
    return check, check


def _tuple_converters(element: Any, where: str) -> tuple[_Convert, _Convert]:
    write, read = _field_converters(element, where)

    def to_plain(value: Any) -> list[Any]:
        if type(value) is not tuple:
            raise Malformed(f"{where} must be a tuple, not {type(value).__name__}")
        if len(value) > _ARRAY_LENGTH_MAX:
            raise Malformed(f"{where} has {len(value)} elements, a record holds at most {_ARRAY_LENGTH_MAX}")
        return [write(item) for item in value]

    def from_plain(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise Malformed(f"{where} must be a list, not {type(value).__name__}")
        return tuple([read(item) for item in value])

    return to_plain, from_plain


def _scalar_check(annotation: type[Any], where: str) -> _Convert:
    assert annotation in _SCALARS, f"{where} has a type that no record may have: {annotation}"

    def check(value: Any) -> Any:
        if type(value) is not annotation:
            raise Malformed(f"{where} must be {annotation.__name__}, not {type(value).__name__}")
        return value

    return check

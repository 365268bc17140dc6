"""Records to bytes and back: exact, one encoding each, and nothing but `FormatError` for any other bytes."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import blake3
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adacheck.manifests.encoding import FORMAT_VERSION, KINDS, MAGIC, decode, encode
from adacheck.manifests.errors import BitFlip, FormatError, Malformed, NewerFormat, NotARecord, Truncated, WrongRecord, ZeroLength
from adacheck.manifests.record import Base, Chain, Fork, Increment, Record, Run, Segment
from tests.record_strategies import records

FORK = Fork("run", 3, 12, True)
RUN = Run("0f1e", 1.5, "adacheck 0.1.0")
SEGMENT = Segment("grad", 0, 8, "raw", 1.0, 0, 32, bytes(32))


def envelope(payload: bytes, kind: int = 3, version: int = FORMAT_VERSION, magic: bytes = MAGIC, length: int | None = None) -> bytes:
    """An envelope with a right checksum around anything."""
    body = magic + struct.pack("<HHI", version, kind, len(payload) if length is None else length) + payload
    return body + blake3.blake3(body).digest()


def fork_payload(**changes: Any) -> bytes:
    """Payload of a fork record with some fields set to anything; `None` removes one."""
    content = {"run": "run", "incarnation": 3, "cut": 12, "proven": True} | changes
    packed: bytes = msgpack.packb({name: value for name, value in content.items() if value is not None})
    return packed


def same(one: Any, other: Any) -> bool:
    """Equality to which NaN is equal to itself and -0.0 differs from 0.0: by representation."""
    return repr(one) == repr(other)


@given(records())
def test_round_trip_of_any_record(record: Record) -> None:
    content = encode(record)
    decoded = decode(content, type(record))
    assert same(decoded, record)
    assert encode(decoded) == content


def test_the_envelope_is_as_documented() -> None:
    payload = b"\x84\xa3run\xa3run\xabincarnation\x03\xa3cut\x0c\xa6proven\xc3"
    head = b"\x89ADACHK\n" + b"\x01\x00" + b"\x03\x00" + len(payload).to_bytes(4, "little")
    assert encode(FORK) == head + payload + blake3.blake3(head + payload).digest()


@given(records(), st.data())
def test_any_single_bit_flip_is_an_error(record: Record, data: st.DataObject) -> None:
    content = bytearray(encode(record))
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BitFlip):
        decode(content, type(record))


def test_every_bit_of_a_record_is_covered() -> None:
    content = encode(FORK)
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BitFlip):
            decode(flipped, Fork)


@given(records())
def test_any_truncation_is_an_error(record: Record) -> None:
    content = encode(record)
    with pytest.raises(ZeroLength):
        decode(b"", type(record))
    for size in {*range(1, min(len(content), 80)), *range(max(1, len(content) - 40), len(content))}:
        with pytest.raises(Truncated):
            decode(content[:size], type(record))


@given(records(), st.binary(min_size=1, max_size=50))
def test_bytes_after_a_record_are_an_error(record: Record, tail: bytes) -> None:
    with pytest.raises(BitFlip):
        decode(encode(record) + tail, type(record))


@pytest.mark.parametrize("wrong", [cls for cls in KINDS.values() if cls is not Fork])
def test_another_kind_is_refused_by_name(wrong: type[Any]) -> None:
    with pytest.raises(WrongRecord, match=f"a Fork record where a {wrong.__name__} record belongs"):
        decode(encode(FORK), wrong)
    with pytest.raises(WrongRecord, match="unknown kind 77"):
        decode(envelope(fork_payload(), kind=77), wrong)


def test_a_newer_format_is_refused_by_both_versions() -> None:
    content = envelope(b"anything a later release likes", version=FORMAT_VERSION + 4)
    with pytest.raises(NewerFormat, match=rf"format version {FORMAT_VERSION + 4}, .* up to {FORMAT_VERSION}") as caught:
        decode(content, Fork)
    assert (caught.value.found, caught.value.known) == (FORMAT_VERSION + 4, FORMAT_VERSION)
    with pytest.raises(BitFlip):  # damage of a newer record is damage, not news
        decode(content[:20] + b"?" + content[21:], Fork)
    with pytest.raises(Truncated):
        decode(content[:-1], Fork)


def test_foreign_bytes_are_not_a_record() -> None:
    for content in (b"{", b"hello", b"PK\x03\x04" + bytes(100), envelope(fork_payload(), magic=b"ADACHECK")):
        with pytest.raises(NotARecord, match="begins with"):
            decode(content, Fork)


def test_a_wrong_header_with_a_right_checksum_is_malformed() -> None:
    for content in (envelope(fork_payload(), version=0), envelope(fork_payload(), length=3), envelope(fork_payload(), length=1 << 31)):
        with pytest.raises(Malformed, match="header"):
            decode(content, Fork)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (fork_payload(cut=None), r"missing \['cut'\]"),
        (fork_payload(extra=1), r"unknown \['extra'\]"),
        (msgpack.packb({"incarnation": 3, "run": "run", "cut": 12, "proven": True}), "in another order"),
        (fork_payload(cut=True), "Fork.cut must be int, not bool"),
        (fork_payload(cut=12.0), "Fork.cut must be int, not float"),
        (fork_payload(proven=1), "Fork.proven must be bool, not int"),
        (fork_payload(run=b"run"), "Fork.run must be str, not bytes"),
        (fork_payload(run=[]), "Fork.run must be str, not list"),
        (msgpack.packb([1, 2]), "a list where the fields of a Fork belong"),
        (fork_payload() + b"\0", "not msgpack of its fields"),
        (fork_payload()[:-1], "not msgpack of its fields"),
        (fork_payload().replace(b"\xa3run\xa3run", b"\xa3run\xa3\xff\xfe\xfd"), "not msgpack of its fields"),
        (fork_payload().replace(b"\xa3cut\x0c", b"\xa3cut\xcd\x00\x0c"), "one encoding"),
        (b"\x85" + fork_payload()[1:] + b"\xa6proven\xc2", "one encoding"),
        (fork_payload(cut=msgpack.ExtType(5, b"x")), "not msgpack of its fields"),
        (fork_payload(cut=msgpack.Timestamp(1)), "not msgpack of its fields"),
        (b"", "not msgpack of its fields"),
    ],
)
def test_malformed_payloads_are_refused(payload: bytes, message: str) -> None:
    if payload == fork_payload():
        pytest.fail("this case changes nothing")
    with pytest.raises(Malformed, match=message):
        decode(envelope(payload), Fork)


def test_nested_fields_are_checked_by_name() -> None:
    segment = {"tensor": "g", "start": "zero"}
    chain: dict[str, Any] = {field.name: () for field in fields(Chain)} | {"run": "r", "anchor_link": b"", "certificates": {}}
    chain |= dict.fromkeys(("generation", "chain", "incarnation", "fence", "anchor_step"), 1)
    with pytest.raises(Malformed, match=r"Chain\.certificates must be a list, not dict"):
        decode(envelope(msgpack.packb(chain), kind=6), Chain)
    increment = dict.fromkeys(("events", "gradients", "values", "derived", "refreshes", "removed"), ())
    head = {"run": "r", "generation": 1, "incarnation": 1, "chain": 0, "step": 1}
    with pytest.raises(Malformed, match=r"Segment has its fields wrong: missing \['stop'"):
        decode(envelope(msgpack.packb(head | increment | {"opaque": (segment,)}), kind=8), Increment)


@given(st.binary(max_size=400))
def test_random_bytes_raise_only_format_errors(content: bytes) -> None:
    for hostile in (content, MAGIC + content, envelope(content), envelope(content, kind=8)):
        with pytest.raises(FormatError):
            decode(hostile, Increment)


HOSTILE = {
    "deep arrays": b"\x91" * 200_000,
    "deep maps": b"\x81\xa1a" * 100_000,
    "deep arrays in a field": fork_payload()[:-1] + b"\x91" * 100_000,
    "huge array": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge binary": b"\xc6\xff\xff\xff\xff",
    "huge text": b"\xdb\xff\xff\xff\xff",
    "huge extension": b"\xc9\xff\xff\xff\xff\x01",
    "wide arrays in each other": b"\xdd\x00\x0f\xff\xff" * 400_000,
    "map as key": b"\x81\x81\xa1a\x01\x01",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_payloads_raise_only_format_errors(name: str) -> None:
    with pytest.raises(Malformed):
        decode(envelope(HOSTILE[name]), Fork)


@pytest.mark.parametrize(
    "bits", [0x7FF8000000000000, 0x7FF8000000000123, 0xFFF8000000000001, 0x8000000000000000, 0x7FF0000000000000, 1, 0x3FB999999999999A]
)
def test_floats_are_kept_bit_for_bit(bits: int) -> None:
    (number,) = struct.unpack("<d", struct.pack("<Q", bits))
    decoded = decode(encode(replace(RUN, created_unix_s=number)), Run)
    assert struct.pack("<d", decoded.created_unix_s) == struct.pack("<Q", bits)
    assert math.copysign(1, decoded.created_unix_s) == (-1 if bits >> 63 else 1)


@pytest.mark.parametrize(
    "record",
    [
        replace(FORK, cut=True),
        replace(FORK, cut=1 << 64),
        replace(FORK, cut=-(1 << 63) - 1),
        replace(FORK, run="\ud800"),
        replace(FORK, proven=1),  # type: ignore[arg-type]
        replace(RUN, created_unix_s=1),
        Increment("r", 1, 1, 0, 1, (), (), (), (), (), [], ()),  # type: ignore[arg-type]
        Increment("r", 1, 1, 0, 1, (), (), (), (), (), (), (FORK,)),  # type: ignore[arg-type]
        SEGMENT,
        None,
    ],
)
def test_what_could_not_be_read_back_is_not_written(record: Any) -> None:
    with pytest.raises(Malformed):
        encode(record)


def test_any_buffer_can_be_decoded() -> None:
    content = encode(FORK)
    padded = bytearray(b"xx" + content + b"yy")
    assert decode(memoryview(padded)[2:-2], Fork) == decode(bytearray(content), Fork) == FORK


def test_manifests_are_usable_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from adacheck.manifests import chain, encoding, errors, keys, record\n"
        "fork = record.Fork('r', 1, 2, False)\n"
        "assert encoding.decode(encoding.encode(fork), record.Fork) == fork\n"
        "assert not [name for name in sys.modules if name.startswith('torch.')]\n"
        "print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("fine\n", "")


@settings(max_examples=20)
@given(st.integers(0, 300))
def test_an_increment_of_hundreds_of_segments_round_trips(count: int) -> None:
    opaque = tuple(replace(SEGMENT, slot=slot, digest=bytes([slot % 256]) * 32) for slot in range(count))
    increment = Increment("r", 1, 1, 0, 1, (), (), (), (), (), (), opaque)
    assert decode(encode(increment), Increment) == increment
    with pytest.raises(WrongRecord):
        decode(encode(increment), Base)

"""Digests as FORMAT.md defines them, computed here a second time from the definition."""

from __future__ import annotations

from dataclasses import replace

import blake3
import msgpack
import pytest

from adacheck.digest import digest, state_digest, tensor_digest, tensor_digest_of_bytes
from adacheck.manifests.record import StateSpec, TensorSpec

MIB4 = 4 * 1024 * 1024
SPEC = StateSpec(
    3,
    "w",
    (),
    "parameter",
    "optim",
    True,
    (TensorSpec("param", "bfloat16", (2, 3), (4, 3), (2, 0)), TensorSpec("step", "float32", (), (), ())),
    b"\x80",
)
DIGESTS = [bytes(range(32)), bytes(32)]


def test_a_digest_is_blake3_whatever_the_bytes_lie_in() -> None:
    content = bytes(range(256)) * 5
    expected = blake3.blake3(content).digest()
    assert digest(content) == digest(bytearray(content)) == digest(memoryview(content)) == expected


@pytest.mark.parametrize("size", [0, 1, MIB4 - 1, MIB4, MIB4 + 1, 2 * MIB4 + 5])
def test_a_tensor_digest_is_that_of_its_segment_digests(size: int) -> None:
    content = bytes(i % 251 for i in range(1000)) * (size // 1000 + 1)
    content = content[:size]
    pieces = [blake3.blake3(content[at : at + MIB4]).digest() for at in range(0, size, MIB4)]
    assert tensor_digest_of_bytes(memoryview(content)) == tensor_digest(pieces) == blake3.blake3(b"".join(pieces)).digest()


def test_a_state_digest_is_that_of_the_documented_array() -> None:
    array = [[["param", "bfloat16", [2, 3], DIGESTS[0]], ["step", "float32", [], DIGESTS[1]]], b"\x80"]
    assert state_digest(SPEC, DIGESTS) == blake3.blake3(msgpack.packb(array)).digest()


def test_a_state_digest_covers_names_dtypes_shapes_order_and_scalars() -> None:
    param, step = SPEC.tensors
    variants = [
        SPEC,
        replace(SPEC, scalars=b""),
        replace(SPEC, tensors=(step, param)),
        replace(SPEC, tensors=(replace(param, name="p"), step)),
        replace(SPEC, tensors=(replace(param, dtype="float16"), step)),
        replace(SPEC, tensors=(replace(param, shape=(3, 2)), step)),
    ]
    found = {state_digest(spec, DIGESTS) for spec in variants} | {state_digest(SPEC, DIGESTS[::-1])}
    assert len(found) == len(variants) + 1
    with pytest.raises(ValueError, match="shorter"):
        state_digest(SPEC, DIGESTS[:1])

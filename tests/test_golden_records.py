"""Records that format version 1 wrote: they decode to the same values for ever, and version 1 goes on writing the same bytes."""

from __future__ import annotations

import pytest

from adacheck.manifests.encoding import FORMAT_VERSION, KINDS, decode, encode
from tests.golden.records_v1 import FOLDER, GOLDEN


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_records_decode_to_their_values(name: str) -> None:
    record = GOLDEN[name]
    assert repr(decode((FOLDER / f"{name}.bin").read_bytes(), type(record))) == repr(record)


@pytest.mark.parametrize("name", GOLDEN)
def test_encoding_still_gives_the_golden_bytes(name: str) -> None:
    assert FORMAT_VERSION == 1, "a new format version has golden records of its own; this test then keeps only to decoding"
    assert encode(GOLDEN[name]) == (FOLDER / f"{name}.bin").read_bytes()


def test_every_kind_has_a_golden_record() -> None:
    assert {type(record) for record in GOLDEN.values()} == set(KINDS.values())
    assert {path.stem for path in FOLDER.iterdir()} == set(GOLDEN)

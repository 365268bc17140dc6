"""Opaque items come back with the same types and bits, or are refused by name; hostile bytes raise one specific error."""

from __future__ import annotations

import collections
import contextlib
import enum
import io
import math
import random
import struct
import warnings
from typing import Any

import msgpack
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adacheck.capture.opaque import DEPTH_MAX, decode, encode
from adacheck.capture.rng import install_rng, rng_state
from adacheck.errors import DamagedCut, StateMismatch, UnsupportedTensor
from adacheck.states import dtype_name


def same(left: Any, right: Any) -> bool:
    """Equal in types and bits, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        bits = left.contiguous().reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)
    if isinstance(left, (numpy.ndarray, numpy.generic)):
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    if isinstance(left, io.BytesIO):
        return bool(left.getvalue() == right.getvalue() and left.tell() == right.tell())
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return struct.pack("<dd", left.real, left.imag) == struct.pack("<dd", right.real, right.imag)
    if isinstance(left, (list, tuple, collections.deque)):
        extra = (left.maxlen == right.maxlen) if isinstance(left, collections.deque) else True
        return extra and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        factories = getattr(left, "default_factory", None) is getattr(right, "default_factory", None)
        return factories and same(list(left.keys()), list(right.keys())) and same(list(left.values()), list(right.values()))
    if isinstance(left, (set, frozenset)):  # NaN in a set is not equal to itself
        return encode("left", left) == encode("right", right)
    return bool(left == right)


def placed(content: bytes, at: int) -> io.BytesIO:
    """A buffer that was read up to somewhere."""
    buffer = io.BytesIO(content)
    buffer.seek(at)
    return buffer


bits = st.integers(0, 2**64 - 1).map(lambda word: struct.unpack("<d", struct.pack("<Q", word))[0])
text = st.text(st.characters(exclude_categories=()))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-(2**300), 2**300), st.floats(), bits, text, st.binary())
tensors = st.sampled_from(
    [torch.tensor(1.5), torch.empty(0, 3), torch.arange(6).reshape(2, 3).t(), torch.randn(3).bfloat16(), torch.ones(2, dtype=torch.bool)]
)
leaves = st.one_of(
    scalars,
    st.complex_numbers(),
    tensors,
    st.sampled_from([torch.Size([2, 3]), torch.float8_e5m2, torch.device("cuda", 1), numpy.float32(-0.0), numpy.array([[1, 2]], "<i2")]),
    st.sets(st.one_of(scalars, st.tuples(scalars))),
    st.frozensets(st.integers()),
    st.binary().map(bytearray),
    st.tuples(st.binary(), st.integers(0, 9)).map(lambda made: placed(*made)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(lambda items: collections.deque(items, 7)),
        st.dictionaries(st.one_of(scalars, st.tuples(scalars, scalars)), inner, max_size=4),
        st.dictionaries(text, inner, max_size=4).map(collections.OrderedDict),
        st.dictionaries(text, inner, max_size=4).map(lambda items: collections.defaultdict(list, items)),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_round_trip_keeps_types_and_bits(value: Any) -> None:
    assert same(decode(encode("extra", value)), value)


@pytest.mark.parametrize("word", [0x7FF0000000000001, 0xFFF8DEADBEEF0001, 0x8000000000000000, 0x7FF0000000000000])
def test_float_bits(word: int) -> None:
    value = struct.unpack("<d", struct.pack("<Q", word))[0]
    assert struct.pack("<d", decode(encode("x", value))) == struct.pack("<Q", word)


def every_dtype() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((dtype for dtype in found if not dtype_name(dtype).startswith(("q", "bits"))), key=str)


@pytest.mark.parametrize("dtype", every_dtype(), ids=dtype_name)
def test_every_dtype(dtype: torch.dtype) -> None:
    raw = torch.arange(3 * 4 * dtype.itemsize, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls complex32 experimental
        tensor = raw.view(dtype).reshape(3, -1)
        back = decode(encode("x", tensor))
    assert back.dtype == dtype and back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), raw)


def test_views_keep_their_values() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    for view in (base.transpose(0, 2), base[:, 1, ::2], torch.tensor(3.0).expand(4, 2), torch.tensor([1 + 2j]).conj()):
        back = decode(encode("x", view))
        assert torch.equal(back, view) and back.dtype == view.dtype


@pytest.mark.parametrize("array", [numpy.zeros((0, 2)), numpy.array("é"), numpy.array(["", ""], "<U0"), numpy.arange(6, dtype=">i4")[::-2],
    numpy.array(["2020-01-01"], "M8[ns]"), numpy.asfortranarray(numpy.ones((2, 3), numpy.float16)), numpy.float64("nan"), numpy.bool_(True),
    numpy.str_("x"), numpy.bytes_(b"")])  # fmt: skip
def test_numpy(array: Any) -> None:
    assert same(decode(encode("x", array)), array)


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"loader": {"foo": [1, 2, 3, object()]}}, r"extra\.loader\.foo\[3\] is a builtins\.object"),
        ({"a": (1, {2: Colour.RED})}, r"extra\.a\[1\]\[2\] is a .*Colour"),
        ([Level.LOW], r"extra\[0\] is a .*Level"),
        ({"p": Point(1, 2)}, r"extra\.p is a .*Point"),
        ({"f": numpy.array([object()], dtype=object)}, r"extra\.f is an array of dtype object"),
        ({"f": numpy.zeros(1, "i4,i4")}, r"extra\.f is an array"),
        ({"s": torch.eye(2).to_sparse()}, r"extra\.s is a torch\.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, r"extra\.m .* on meta"),
        ({"d": collections.defaultdict(lambda: 1)}, r"extra\.d is a defaultdict"),
        ({"c": collections.Counter("aa")}, r"extra\.c is a collections\.Counter"),
        ({Level.LOW: 1}, r"extra\[.*\] has a key of type Level"),
        ({frozenset(): 1}, r"extra\[.*\] has a key of type frozenset"),
        (range(3), r"extra is a builtins\.range"),
        (torch.Generator(), r"extra is a torch.*Generator"),
    ],
)
def test_refused_by_path_and_type(value: Any, path: str) -> None:
    with pytest.raises(UnsupportedTensor, match=path):
        encode("extra", value)


def test_self_reference_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedTensor, match="levels deep"):
        encode("extra", loop)


def nested(make: Any, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda inner: (inner,), lambda inner: [inner], lambda inner: {"a": inner}], ids=["tuple", "list", "dict"])
def test_deepest_allowed_nesting_comes_back(make: Any) -> None:
    value = nested(make, DEPTH_MAX)
    assert decode(encode("x", value)) == value
    with pytest.raises(UnsupportedTensor):
        encode("x", nested(make, DEPTH_MAX + 1))


def test_sets_have_one_encoding() -> None:
    left, right = {0, 8}, {8, 0}  # they collide in a table of 8, so the order of insertion shows
    assert list(left) != list(right)
    assert encode("x", left) == encode("x", right)


def test_plain_values_are_plain_msgpack() -> None:
    value = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": None, "n": 3}
    assert msgpack.unpackb(encode("x", value)) == value


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.tuples(values, st.data()).map(lambda pair: pair[0])), st.data())
def test_hostile_bytes_raise_only_damaged(seed: Any, data: st.DataObject) -> None:
    content = bytearray(seed if isinstance(seed, bytes) else encode("x", seed))
    for _ in range(data.draw(st.integers(1, 3))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own remarks about dtypes that the mutation happens to name
        with contextlib.suppress(DamagedCut):
            decode(bytes(content))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb(1) + b"x",
        msgpack.packb(msgpack.ExtType(99, b"")),
        msgpack.packb(msgpack.ExtType(9, msgpack.packb(["float32", [2**40], b""]))),
        msgpack.packb(msgpack.ExtType(9, msgpack.packb(["float32", [0, 2**62, 2**62], b""]))),
        msgpack.packb(msgpack.ExtType(9, msgpack.packb(["Tensor", [1], b"x"]))),
        msgpack.packb(msgpack.ExtType(9, msgpack.packb(["float32", [-1, -1], b"abcd"]))),
        msgpack.packb(msgpack.ExtType(10, msgpack.packb(["O", [1], b"12345678"]))),
        msgpack.packb(msgpack.ExtType(10, msgpack.packb(["<U0", [2**30], b""]))),
        msgpack.packb(msgpack.ExtType(8, msgpack.packb(["eval", {}]))),
        msgpack.packb({"a": 1})[:-1],
    ],
)
def test_known_bad_bytes(content: bytes) -> None:
    with pytest.raises(DamagedCut, match="no opaque item"):
        decode(content)


def test_deeply_nested_bytes_do_not_overflow_the_stack() -> None:
    content = msgpack.packb(None)
    for _ in range(5000):
        content = msgpack.packb(msgpack.ExtType(3, content))
    with pytest.raises(DamagedCut, match="levels deep"):
        decode(content)


def draws() -> tuple[Any, ...]:
    return random.random(), random.gauss(0, 1), numpy.random.standard_normal(), torch.rand(3).tolist()


def test_rng_goes_on_where_it_was() -> None:
    random.gauss(0, 1)
    numpy.random.standard_normal()  # both keep half a pair back
    state = encode("rng", rng_state())
    expected = [draws() for _ in range(3)]
    draws()
    install_rng(decode(state))
    assert [draws() for _ in range(3)] == expected


def test_numpy_generator_state_round_trips() -> None:
    generator = numpy.random.default_rng(7)
    state = encode("rng", generator.bit_generator.state)
    expected = generator.random(4).tolist()
    generator.bit_generator.state = decode(state)
    assert generator.random(4).tolist() == expected


@pytest.mark.parametrize("broken", ["python", "numpy", "torch", "cuda"])
def test_rng_is_installed_whole_or_not_at_all(broken: str) -> None:
    state = rng_state()
    draws()
    before = encode("rng", rng_state())
    bad = state | {broken: [torch.zeros(1, dtype=torch.uint8)] if broken == "cuda" else torch.zeros(3, dtype=torch.uint8)}
    with pytest.raises(StateMismatch, match=broken if broken != "cuda" else "CUDA"):
        install_rng(bad)
    assert encode("rng", rng_state()) == before


def test_nan_is_a_value() -> None:
    assert math.isnan(decode(encode("x", {"loss": [math.nan]}))["loss"][0])

"""Whether what a record says of bytes makes sense: the specs of states, and the segments that are to fill them. See `sense.py`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import msgpack

from adacheck.digest import state_digest, tensor_digest
from adacheck.manifests import keys
from adacheck.manifests.record import DIGEST_BYTES, SEGMENT_BYTES_MAX, STATE_KINDS, Segment, StateSpec, TensorSpec
from adacheck.planes import packed, unpacked

Reasons = Iterator[str]
"""Why something makes no sense, in words; nothing where it does."""

ITEM_BYTES: Mapping[str, int] = {
    name: size
    for size, names in {
        1: "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
        " bits8 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7",
        2: "bfloat16 float16 int16 uint16 bits16",
        4: "float32 int32 uint32 complex32",
        8: "float64 int64 uint64 complex64",
        16: "complex128",
    }.items()
    for name in names.split()
}
"""Every dtype that a tensor of a store can have, and the bytes of one element."""


def out_of_range(**numbers: int) -> Reasons:
    """Each fits into the names that it is part of."""
    for name, value in numbers.items():
        if not 0 <= value < keys.limit(name):
            yield f"{name} {value}"


def bad_states(numbers: Iterable[int], what: str) -> Reasons:
    """Each state once, and none that no name has room for."""
    numbers = tuple(numbers)
    if len(set(numbers)) != len(numbers):
        yield f"{what} names a state twice"
    for number in numbers:
        yield from (f"{what} names {problem}" for problem in out_of_range(state=number))


def tensor_bytes(spec: TensorSpec) -> int:
    """Size of a tensor (this rank's chunk) in bytes; as `states.spec_bytes`, and without torch."""
    return prod(spec.shape) * ITEM_BYTES[spec.dtype]


def bad_spec(spec: StateSpec) -> Reasons:
    """A state that exists nowhere: without a name or a parameter, with a dtype or a shape that cannot be."""
    yield from out_of_range(state=spec.state)
    names = [tensor.name for tensor in spec.tensors]
    if names[:1] != ["param"] or len(set(names)) != len(names):
        yield f"{spec.fqn!r} has the tensors {names}: 'param' comes first, and each once"
    if not spec.fqn or spec.kind not in STATE_KINDS:
        yield f"{spec.fqn!r} is a {spec.kind!r}"
    if spec.scalars and not is_map(spec.scalars):
        yield f"the scalars of {spec.fqn!r} are no map"
    for tensor in spec.tensors:
        yield from (f"{spec.fqn}.{tensor.name} {problem}" for problem in _tensor(tensor))


def _tensor(spec: TensorSpec) -> Reasons:
    if spec.dtype not in ITEM_BYTES:
        yield f"has dtype {spec.dtype!r}, which does not exist"
    if not len(spec.shape) == len(spec.global_shape) == len(spec.offsets):
        yield f"has shape {spec.shape} at {spec.offsets} in {spec.global_shape}"
    elif any(not 0 <= at <= at + size <= whole for at, size, whole in zip(spec.offsets, spec.shape, spec.global_shape, strict=True)):
        yield f"has shape {spec.shape} at {spec.offsets}, not inside {spec.global_shape}"


def is_map(content: bytes) -> bool:
    """Whether these bytes are a msgpack map, whatever extension types are in it."""
    try:
        return type(msgpack.unpackb(content, strict_map_key=False, unicode_errors="surrogatepass")) is dict
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False


def bad_whole(
    spec: StateSpec, segments: Sequence[Segment], digest: bytes, *, may_pack: bool = False, omitted: Collection[str] = ()
) -> Reasons:
    """The segments are not all bytes of the state, or its digest is not theirs. `may_pack`: if packed, only the bytes tell.

    `omitted` tensors are derived from others, and are not among the bytes.
    """
    problem = next(bad_spec(spec), None)
    if problem is not None:
        yield problem
        return
    tensors = tuple(tensor for tensor in spec.tensors if tensor.name not in omitted)
    found: dict[str, list[Segment]] = {tensor.name: [] for tensor in tensors}
    for segment in segments:
        if segment.tensor not in found or (unpacked(segment.codec) if may_pack else segment.codec) != "raw":
            yield f"{segment.codec!r} bytes for {spec.fqn}.{segment.tensor}, where all of it belongs, raw"
            return
        found[segment.tensor].append(segment)
    for tensor in tensors:
        size = ITEM_BYTES[tensor.dtype]
        yield from bad_row(found[tensor.name], prod(tensor.shape), size, f"{spec.fqn}.{tensor.name}", every=SEGMENT_BYTES_MAX // size)
    if any(segment.codec != "raw" for segment in segments):
        return
    digests = [tensor_digest([segment.digest for segment in found[tensor.name]]) for tensor in tensors]
    if state_digest(replace(spec, tensors=tensors), digests) != digest:
        yield f"the digest of {spec.fqn} is not that of its segments"


# Segments


def bad_row(segments: Sequence[Segment], elements: int, item_bytes: int, what: str, every: int | None = None) -> Reasons:
    """Segments in order, without a gap, up to `elements`; `every`: cut there and nowhere else."""
    at = 0
    for segment in segments:
        right = min(at + every, elements) if every else segment.stop
        if segment.start != at or segment.stop != right or not at < segment.stop <= elements:
            yield f"{what} has elements {segment.start}:{segment.stop} after its first {at} of {elements}"
            return
        yield from bad_segment(segment, item_bytes, what)
        at = segment.stop
    if at != elements:
        yield f"{what} has {at} of its {elements} elements"


def bad_segment(segment: Segment, item_bytes: int, what: str) -> Reasons:
    """A codec that does not exist, or a length that does not fit it; elements of `item_bytes` before they are encoded."""
    elements, codec = segment.stop - segment.start, unpacked(segment.codec)
    width = {"raw": item_bytes, "bf16": 2, "bf16*k": 2}.get(codec)
    if width is None or (segment.codec != codec and segment.codec != packed(codec, width)):
        yield f"{what}: there is no codec {segment.codec!r} for elements of {item_bytes} bytes"
        return
    fits = segment.stored_bytes == elements * width if segment.codec == codec else 0 < segment.stored_bytes < elements * width
    if codec != "raw":
        fits = fits and item_bytes == 4 and math.isfinite(segment.coefficient)
    if not fits or len(segment.digest) != DIGEST_BYTES or elements * item_bytes > SEGMENT_BYTES_MAX:
        yield f"{what} has {segment.stored_bytes} bytes of {segment.codec} for {elements} elements of {item_bytes} bytes"


def bad_items(segments: Sequence[Segment], *, in_one_object: bool) -> Reasons:
    """Opaque items: each in one piece of one object, or in a row of segments of its own."""
    at: dict[str, int] = {}
    for segment in segments:
        if in_one_object and segment.tensor in at:
            yield f"two opaque items {segment.tensor!r}"
        begins = segment.start if in_one_object else at.get(segment.tensor, 0)
        size = segment.stop - segment.start
        fits = segment.start == begins and 0 <= segment.start <= segment.stop and segment.stored_bytes == size
        if segment.codec != "raw" or not fits or len(segment.digest) != DIGEST_BYTES:
            yield f"{segment.stored_bytes} {segment.codec} bytes {segment.start}:{segment.stop} of the opaque item {segment.tensor!r}"
        at[segment.tensor] = segment.stop


def bad_slots(segments: Iterable[Segment]) -> Reasons:
    """Each segment has an object of its own."""
    seen: set[int] = set()
    for segment in segments:
        if segment.slot in seen:
            yield f"two segments in slot {segment.slot}"
        yield from out_of_range(slot=segment.slot)
        seen.add(segment.slot)

"""The bytes of tensors, from whichever tier has them: a segment out of a shard, a shard out of bases. Without torch, and checked by
whoever asks, whose digest they must have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from adacheck.backends.base import Backend
from adacheck.backends.errors import NotFound
from adacheck.digest import tensor_digest, tensor_digest_of_bytes
from adacheck.errors import DamagedCut
from adacheck.keeper.stored import read_verified, slot_key
from adacheck.manifests.record import Base, Full, Segment, Shard, ShardTensor, StateSpec
from adacheck.safetensors_shard import LENGTH_BYTES, Entry, Place, header, header_bytes, places
from adacheck.sense_bytes import ITEM_BYTES


def tensor_range(objects: Backend, folder: str, manifest: Full, state: int, segment: Segment) -> bytes | None:
    """The bytes of a raw segment of state number `state` of a full checkpoint; `None` if its shard cannot be read."""
    for shard in manifest.shards:
        for held in shard.tensors:
            if (held.state, held.tensor) == (state, segment.tensor):
                place = _places(objects, f"{folder}/{shard.name}").get(held.key)
                spec = next(spec for spec in manifest.states[state].tensors if spec.name == held.tensor)
                size = ITEM_BYTES[spec.dtype]
                if place is None or place.stop - place.start != prod(spec.shape) * size:
                    return None
                return objects.get(f"{folder}/{shard.name}", (place.start + segment.start * size, place.start + segment.stop * size))
    return None


def _places(objects: Backend, key: str) -> dict[str, Place]:
    try:
        length = header_bytes(objects.get(key, (0, LENGTH_BYTES)))
        return places(objects.get(key, (0, length)))
    except (NotFound, DamagedCut):
        return {}


def shard_from_tensors(
    objects: Backend, nvme: Backend | None, folder: str, manifest: Full, shard: Shard, bases: Mapping[str, Base]
) -> bytes:
    """A shard made again: each tensor from the shard as it is, where its digest is right, else from a base (or staged state).

    Args:
        bases: by their keys on NVMe.

    Raises:
        DamagedCut: a tensor is right nowhere.
    """
    there = _places(objects, f"{folder}/{shard.name}")
    content = bytearray(header([_entry(manifest, held) for held in shard.tensors]))
    for held in shard.tensors:
        if not held.digests:
            continue
        content += _own(objects, f"{folder}/{shard.name}", there.get(held.key), held) or _based(nvme, manifest, held, bases)
    return bytes(content)


def _entry(manifest: Full, held: ShardTensor) -> Entry:
    state = manifest.states[held.state]
    spec = next(spec for spec in state.tensors if spec.name == held.tensor)
    aliases = tuple(f"model.{alias}" for alias in state.aliases) if held.tensor == "param" else ()
    return Entry(held.key, spec, ITEM_BYTES[spec.dtype], aliases)


def _own(objects: Backend, key: str, place: Place | None, held: ShardTensor) -> bytes | None:
    content = b"" if place is None else objects.get(key, (place.start, place.stop))
    return content if content and tensor_digest_of_bytes(memoryview(content)) == tensor_digest(held.digests) else None


def _based(nvme: Backend | None, manifest: Full, held: ShardTensor, bases: Mapping[str, Base]) -> bytes:
    spec = manifest.states[held.state]
    for key, base in bases.items() if nvme is not None else ():
        segments = _of_tensor(base, spec, held)
        if segments is None or nvme is None:
            continue
        try:
            return b"".join(read_verified(nvme, slot_key(key, segment.slot), segment) for segment in segments)
        except DamagedCut:
            continue
    raise DamagedCut(f"{held.key} is right neither in its shard nor on NVMe")


def _of_tensor(base: Base, spec: StateSpec, held: ShardTensor) -> Iterable[Segment] | None:
    """The segments of the same tensor with the same bytes; `None` where the base has others."""
    segments = [segment for segment in base.segments if segment.tensor == held.tensor]
    same = base.spec.fqn == spec.fqn and tuple(segment.digest for segment in segments) == held.digests
    return segments if same else None

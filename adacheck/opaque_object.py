"""The object of a full checkpoint that holds its opaque items; without torch, so that a repair can make it again."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import msgpack

from adacheck.digest import digest
from adacheck.manifests.record import Segment


def opaque_object(items: Sequence[tuple[str, bytes]]) -> tuple[bytes, tuple[Segment, ...]]:
    """A msgpack map of names to bytes, and for each item its range and digest in it."""
    if len({name for name, _ in items}) != len(items):
        raise ValueError(f"opaque items must have different names: {[name for name, _ in items]}")
    packer = msgpack.Packer()
    content = bytearray(packer.pack_map_header(len(items)))
    segments = []
    for name, item in items:
        content += packer.pack(name) + b"\xc6" + struct.pack(">I", len(item))
        segments.append(Segment(name, len(content), len(content) + len(item), "raw", 1.0, 0, len(item), digest(item)))
        content += item
    return bytes(content), tuple(segments)


def made_again(content: bytes, listed: Sequence[Segment], others: Mapping[str, bytes]) -> bytes | None:
    """The object whose items are `listed`: each as `content` has it where its digest is right there, else from `others`, by name.

    `None` if an item is right in neither.
    """
    items = []
    for item in listed:
        known = (content[item.start : item.stop], others.get(item.tensor, b""))
        right = next((found for found in known if digest(found) == item.digest), None)
        if right is None:
            return None
        items.append((item.tensor, right))
    return opaque_object(items)[0]

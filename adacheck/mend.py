"""Turns a single flipped bit back: every bit is tried, and the digest says which one it was. Pure.

Memory and disks flip single bits, and a digest that was right before proves the answer. What is longer than `MEND_BYTES_MAX` is
left alone: all bits of n bytes are n hashes of n bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import blake3

from adacheck.manifests.record import DIGEST_BYTES

MEND_BYTES_MAX = 64 << 10
"""Longest content that is tried: some ten seconds."""


def mended(content: bytes, is_right: Callable[[memoryview], bool], where: Iterable[int] | None = None) -> bytes | None:
    """`content` with the one bit turned back that makes it right; `None` if no single bit does.

    Args:
        is_right: whether bytes have the digest they must have.
        where: positions of the bytes that may be the wrong one; all, if not given.
    """
    if len(content) > MEND_BYTES_MAX:
        return None
    tried = bytearray(content)
    view = memoryview(tried)
    for at in range(len(tried)) if where is None else where:
        for bit in range(8):
            tried[at] ^= 1 << bit
            if is_right(view):
                return bytes(tried)
            tried[at] ^= 1 << bit
    return None


def has_digest(wanted: bytes) -> Callable[[memoryview], bool]:
    """Right is what has this digest."""
    return lambda view: blake3.blake3(view).digest() == wanted


def is_sealed(view: memoryview) -> bool:
    """Right is a record that fits its own checksum, its last 32 bytes."""
    return blake3.blake3(view[:-DIGEST_BYTES]).digest() == view[-DIGEST_BYTES:]

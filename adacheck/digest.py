"""Digests of bytes, tensors and states, all BLAKE3-256; no torch, so that fsck can check every byte without it.

A tensor is digested in two levels: each 4 MiB of its bytes, then the list of those digests. So a writer that streams segments
gets the digest of the whole tensor from digests it needed anyway, and a reader can check any one segment by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import blake3
import msgpack

from adacheck.manifests.record import SEGMENT_BYTES_MAX, StateSpec

Buffer = bytes | bytearray | memoryview


def digest(content: Buffer) -> bytes:
    """BLAKE3-256 of one buffer (C-contiguous), 32 bytes; about 4.5 GB/s on one thread, without the interpreter lock."""
    return blake3.blake3(content).digest()


def tensor_digest(segment_digests: Sequence[bytes]) -> bytes:
    """Digest of a tensor from those of its raw segments: cut at every `SEGMENT_BYTES_MAX` bytes, in order; empty for no bytes."""
    return digest(b"".join(segment_digests))


def tensor_digest_of_bytes(content: memoryview) -> bytes:
    """`tensor_digest` of a tensor whose bytes are all at hand (flat, format `B`)."""
    return tensor_digest([digest(content[at : at + SEGMENT_BYTES_MAX]) for at in range(0, len(content), SEGMENT_BYTES_MAX)])


def state_digest(spec: StateSpec, tensor_digests: Sequence[bytes]) -> bytes:
    """Digest of a state: names, dtypes and shapes of its tensors, their digests (in `spec.tensors` order), and its scalars."""
    described = [[t.name, t.dtype, list(t.shape), d] for t, d in zip(spec.tensors, tensor_digests, strict=True)]
    return digest(msgpack.packb([described, spec.scalars]))

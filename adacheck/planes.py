"""Compression of a segment's bytes: split into byte planes, then zstd. Lossless whatever the bits are; works without torch.

The first bytes of all elements, then the second ones, and so on: exponents lie beside exponents, where they repeat, and the
noise of mantissas is left by itself. The codec says so and names the width, so a reader needs nothing but the segment's record.
"""

from __future__ import annotations

import re
import threading
from functools import lru_cache

import numpy as np
import zstandard

from adacheck.digest import Buffer
from adacheck.errors import DamagedCut
from adacheck.manifests.record import SEGMENT_BYTES_MAX, Segment

WIDTHS = (1, 2, 4, 8, 16)
"""Bytes of an element, and so the number of planes."""

_PACKED = re.compile(r"(?P<codec>.+)\+zstd(?P<width>[0-9]+)")
_per_thread = threading.local()


def packed(codec: str, width: int) -> str:
    """The codec of a segment in `codec` whose elements of `width` bytes were packed: `bf16+zstd2`."""
    return f"{codec}+zstd{width}"


@lru_cache(maxsize=64)  # asked for each segment, and there are few
def unpacked(codec: str) -> str:
    """The codec of a segment's bytes once they are unpacked: `bf16` of `bf16+zstd2`, and of `bf16`."""
    match = _PACKED.fullmatch(codec)
    return match["codec"] if match else codec


@lru_cache(maxsize=64)
def plane_width(codec: str) -> int | None:
    """Bytes of an element of a packed segment, `None` for one that is not packed.

    Raises:
        DamagedCut: a width that no element has.
    """
    match = _PACKED.fullmatch(codec)
    if match is None:
        return None
    if match["width"] not in map(str, WIDTHS):
        raise DamagedCut(f"a segment has codec {codec!r}, whose elements are not of {', '.join(map(str, WIDTHS))} bytes")
    return int(match["width"])


def unpacked_bytes(segment: Segment) -> int:
    """Length of a segment's bytes once they are unpacked, going by its record.

    Raises:
        DamagedCut: as `plane_width`.
    """
    width = plane_width(segment.codec)
    return segment.stored_bytes if width is None else (segment.stop - segment.start) * width


class Packer:
    """Packs one segment after another; for one thread. Memory: one segment, and zstd's 0.6 MiB at level 1, up to 65 at higher ones."""

    def __init__(self, level: int) -> None:
        self._zstd = zstandard.ZstdCompressor(level=level, write_content_size=True)
        self._scratch = np.empty(SEGMENT_BYTES_MAX, np.uint8)

    def pack(self, content: Buffer, width: int) -> bytes | None:
        """One zstd frame with the planes of `content` (at most 4 MiB); `None` if that is not shorter."""
        if len(content) == 0:
            return None
        planes = self._scratch[: len(content)]
        np.copyto(planes.reshape(width, -1), np.frombuffer(content, np.uint8).reshape(-1, width).T)
        frame: bytes = self._zstd.compress(planes.data)
        return frame if len(frame) < len(content) else None


def unpack(segment: Segment, content: bytes) -> bytes:
    """The bytes of a segment as they were before packing, from those stored, whose digest is checked already.

    The record bounds them: a frame that says, or turns out, to hold anything else is not expanded.

    Raises:
        DamagedCut: the content is not one frame with exactly the bytes that the record says.
    """
    width = plane_width(segment.codec)
    if width is None:
        return content
    raw_bytes = unpacked_bytes(segment)
    try:
        says = zstandard.frame_content_size(content)
        if not 0 < says == raw_bytes <= SEGMENT_BYTES_MAX:  # zstandard would allocate whatever the frame says
            raise ValueError(f"its frame says {says} bytes, the record {raw_bytes}")
        planes = _decompressor().decompress(content, max_output_size=raw_bytes, allow_extra_data=False)
        if len(planes) != raw_bytes:
            raise ValueError(f"it holds {len(planes)} bytes, the record says {raw_bytes}")
    except (ValueError, zstandard.ZstdError) as error:
        what = f"segment {segment.slot} ({segment.tensor} {segment.start}:{segment.stop}, codec {segment.codec})"
        raise DamagedCut(f"{what} cannot be unpacked: {error}; run adacheck-fsck --read-data") from error
    return np.frombuffer(planes, np.uint8).reshape(width, -1).T.tobytes()


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's: they are not made for several."""
    if not hasattr(_per_thread, "zstd"):
        _per_thread.zstd = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _per_thread.zstd
    return found

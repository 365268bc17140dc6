"""Lossless narrowing of gradient segments: fp32 that carries only bf16 values travels as bf16, also behind a clip coefficient.

Pure bytes in, bytes out, on one thread and without the interpreter lock for all but microseconds. Checked bit by bit on the way in,
so what is narrowed widens to the same bits, NaN payloads and -0.0 included; what does not, stays as it was.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from adacheck.digest import Buffer
from adacheck.manifests.record import SEGMENT_BYTES_MAX
from adacheck.states import tensor_bytes
from adacheck.threads import arithmetic

RAW, BF16, BF16_SCALED = "raw", "bf16", "bf16*k"

_ELEMENTS_MAX = SEGMENT_BYTES_MAX // 4
_PEEK_ELEMENTS = 1024
_LOW_HALF = 0xFFFF
_HIGH = 1  # index of the high half among the two uint16 of a little-endian fp32
_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """What to store for a segment: `codec` and `coefficient` as in `record.Segment`; `stored` is valid until the next `narrow`."""

    codec: str
    coefficient: float
    stored: memoryview


class Narrower:
    """Narrows one segment after another into the same scratch memory (6 MiB); one for each thread."""

    def __init__(self) -> None:
        self._halves = torch.empty(_ELEMENTS_MAX, dtype=torch.bfloat16, device="cpu")
        self._halves_u16 = self._halves.view(torch.int16).numpy().view(np.uint16)
        self._stored = tensor_bytes(self._halves)
        self._scratch = torch.empty(_ELEMENTS_MAX, dtype=torch.float32, device="cpu")

    def narrow(self, raw: memoryview, dtype: str, coefficient: float | None = None) -> Narrowed:
        """Narrow a segment of at most 4 MiB.

        Args:
            raw: its bytes, flat, format `B`; not kept, and returned as `stored` where nothing can be gained.
            dtype: torch's name of its dtype; only `float32` can be narrowed.
            coefficient: what every element was multiplied with last (`clip_grad_norm_`), as an fp32 value; `None` if with nothing.
        """
        if dtype != "float32" or len(raw) == 0:
            return Narrowed(RAW, 1.0, raw)
        values = np.frombuffer(raw, np.float32)
        if self._take_high_halves(values):
            return Narrowed(BF16, 1.0, self._stored[: 2 * values.size])
        if coefficient is not None and _usable(coefficient):
            with arithmetic(flush_denormal=True):
                divided = self._divide(values, coefficient)
            if divided:
                return Narrowed(BF16_SCALED, coefficient, self._stored[: 2 * values.size])
        return Narrowed(RAW, 1.0, raw)

    def _take_high_halves(self, values: np.ndarray) -> bool:
        """Copy the high halves, unless some low half is not zero; integers only, since a cast would quiet NaNs."""
        bits = values.view(np.uint32)
        for part in (bits[:_PEEK_ELEMENTS], bits):
            if int(np.bitwise_or.reduce(part)) & _LOW_HALF:
                return False
        np.copyto(self._halves_u16[: values.size], values.view(np.uint16)[_HIGH::2])
        return True

    def _divide(self, values: np.ndarray, coefficient: float) -> bool:
        """Find u = bf16(c/k), unless float(u)*k is not c bit for bit for some c.

        With denormals flushed, c and u pass only if they are zero or normal. Such a product is the same in either mode, so a
        segment can be widened by a thread in any mode.
        """
        for count in dict.fromkeys((min(_PEEK_ELEMENTS, values.size), values.size)):
            clipped = _tensor(values[:count].view(np.uint8).data, torch.float32)
            scratch, halves = self._scratch[:count], self._halves[:count]
            torch.div(clipped, coefficient, out=scratch)
            halves.copy_(scratch)
            scratch.copy_(halves).mul_(coefficient)
            if not torch.equal(scratch.view(torch.int32), clipped.view(torch.int32)):
                return False
        return True


def widen(stored: Buffer, codec: str, coefficient: float, out: torch.Tensor) -> None:
    """Write a segment's elements into `out`, bit for bit what was narrowed.

    Args:
        stored: the segment's bytes, digest checked.
        codec, coefficient: as recorded with it.
        out: contiguous CPU tensor (a range of one) of as many elements; any dtype for `raw`, else fp32.

    Raises:
        ValueError: an unknown codec, or a length that does not fit: the record does not belong to these bytes.
    """
    if codec not in (RAW, BF16, BF16_SCALED):
        raise ValueError(f"segment has unknown codec {codec!r}; restore with the release that wrote it")
    expected_bytes = out.numel() * (out.itemsize if codec == RAW else 2)
    if len(stored) != expected_bytes or (codec != RAW and out.dtype != torch.float32):
        raise ValueError(
            f"segment of {len(stored)} bytes with codec {codec} cannot fill {out.numel()} elements of {out.dtype}; "
            "check the store with adacheck-fsck"
        )
    if out.numel() == 0:
        return
    if codec == RAW:
        np.copyto(np.frombuffer(tensor_bytes(out), np.uint8), np.frombuffer(stored, np.uint8))
        return
    flat = out.detach().view(-1)
    flat.copy_(_tensor(stored, torch.bfloat16))
    if codec == BF16_SCALED:
        flat.mul_(coefficient)


def _usable(coefficient: float) -> bool:
    """Whether this is a normal, positive fp32 other than one: 0, infinity and NaN would keep nothing of u."""
    if not _FLOAT32.tiny <= coefficient <= _FLOAT32.max or coefficient == 1.0:
        return False
    return float(np.float32(coefficient)) == coefficient


def _tensor(content: Buffer, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over bytes that may be read-only (torch warns of those); only to be read, and only while `content` lives."""
    address = np.frombuffer(content, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_char * len(content)).from_address(address), dtype=dtype)

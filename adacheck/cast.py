"""Rebuilds a narrow tensor from a wider one: one cast, the same bits for whoever computes it, in the trainer or at a restore.

torch rounds to nearest even whatever the vector width, the threads and the strides, but a NaN gets other bits in a vector than in
the remainder beside it. So a tensor with a NaN is no cast of anything. Denormals are kept, whatever mode the thread is in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from adacheck.same import same_bytes
from adacheck.threads import arithmetic

FIRST_ELEMENTS = 1 << 12
"""Looked at first: of two tensors that have nothing to do with each other, no more is read."""

CHUNK_ELEMENTS = 1 << 20
"""So many of a source are cast and compared at a time: the result is still in the cache."""


def is_cast(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `tensor` equals `source` cast to its dtype, bit for bit, and has no NaN. Exact; reads both once where they are equal."""
    if tensor.shape != source.shape:
        return False
    narrow, wide = tensor.detach().reshape(-1), source.detach().reshape(-1)
    with arithmetic(flush_denormal=False):
        for start, stop in _chunks(narrow.numel()):
            part = wide[start:stop]
            if not same_bytes(part.to(narrow.dtype), narrow[start:stop]) or math.isnan(part.amax().item()):  # a NaN is the greatest
                return False
    return True


def cast_into(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Make `tensor` what `is_cast` found it to be."""
    with torch.no_grad(), arithmetic(flush_denormal=False):
        tensor.copy_(source)


def _chunks(elements: int) -> Iterator[tuple[int, int]]:
    start, size = 0, FIRST_ELEMENTS
    while start < elements:
        yield start, min(start + size, elements)
        start, size = start + size, CHUNK_ELEMENTS

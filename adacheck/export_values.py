"""Opaque items for others: as JSON for people to read, and as plain values that `torch.load(weights_only=True)` takes."""

from __future__ import annotations

import collections
import io
import math
from typing import Any

import numpy
import torch

from adacheck.digest import digest
from adacheck.states import dtype_name, tensor_bytes

_LONG = 32


def summary(value: Any) -> Any:
    """A value as JSON; tensors, arrays, bytes and long sequences are described, not written out."""
    if isinstance(value, torch.Tensor):
        content = tensor_bytes(value.contiguous())
        return {"tensor": dtype_name(value.dtype), "shape": list(value.shape), "blake3": digest(content).hex()}
    if isinstance(value, numpy.ndarray):
        return {"array": str(value.dtype), "shape": list(value.shape), "blake3": digest(value.tobytes()).hex()}
    if isinstance(value, io.BytesIO):
        return summary(value.getvalue())
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": len(value), "blake3": digest(value).hex()}
    if isinstance(value, dict):
        return {str(key): summary(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        items = [summary(item) for item in list(value)[:_LONG]]
        return items if len(value) <= _LONG else {"first": items, "length": len(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def loadable(value: Any) -> Any:
    """A value of types that torch loads without running anything: arrays become tensors where torch has the dtype, the rest plain."""
    if isinstance(value, numpy.ndarray):
        try:
            return torch.from_numpy(value.copy())
        except TypeError:
            return value.tolist()
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, collections.OrderedDict):
        return collections.OrderedDict((key, loadable(item)) for key, item in value.items())
    if isinstance(value, dict):
        return {key: loadable(item) for key, item in value.items()}
    if isinstance(value, (list, collections.deque)):
        return [loadable(item) for item in value]
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple):
        return tuple(loadable(item) for item in value)
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, (set, frozenset)):
        return {loadable(item) for item in value}
    return bytes(value) if isinstance(value, bytearray) else value

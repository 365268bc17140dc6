"""A cut as `torch.distributed.checkpoint` sees it: what is there under which key, and the parts of it that a rank asks for.

Both kinds of source, full checkpoints and NVMe copies, are read through the same few lines; each verifies what it gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from adacheck.capture import extra_state, opaque
from adacheck.flat_keys import FlatKeys, extra_states
from adacheck.full_reader import Rows
from adacheck.install import OPTIMIZER
from adacheck.manifests.record import StateSpec, TensorSpec
from adacheck.states import dtype_of, tensor_spec


class Parts(Protocol):
    """One source of one cut: `FullReader` and `NvmeReader` are such. States have numbers that are the source's own."""

    @property
    def specs(self) -> Mapping[int, StateSpec]:
        """Every state."""

    def read(self, wanted: Mapping[int, Sequence[Rows]]) -> Iterator[tuple[int, list[torch.Tensor], Mapping[str, object]]]:
        """The rows asked for of each state, and its optimizer's entries that are no tensors; all verified."""

    def opaque(self, prefix: str = "") -> dict[str, bytes]:
        """The opaque items whose names begin so."""


class Contents:
    """What one source has of a cut. Reads the records of it, the hyperparameters, and modules' extra state.

    Raises:
        DamagedCut, BackendError: these cannot be read.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, self._keys = parts, FlatKeys(parts.specs)
        self._chunks: dict[str, list[TensorSpec]] = {}
        self._places: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
        for key, number, name in (*self._keys.tensors(), *self._keys.tied()):
            spec = next(tensor for tensor in parts.specs[number].tensors if tensor.name == name)
            if prod(spec.global_shape) and not prod(spec.shape):
                continue  # an empty chunk has the offsets of a real one
            self._chunks.setdefault(key, []).append(spec)
            self._places[key, spec.offsets] = (number, name)
        states = parts.opaque(extra_state.STATE) | parts.opaque(extra_state.SHARED)
        self._values = flattened(self._keys.hyperparameters(parts.opaque(OPTIMIZER)) | extra_states(states))
        scalars = {number: opaque.decode(spec.scalars) for number, spec in parts.specs.items() if spec.scalars}
        self._scalars = {number: flattened(self._keys.scalars(number, values)) for number, values in scalars.items()}
        self._owner = {key: number for number, values in self._scalars.items() for key in values}

    def metadata(self) -> Metadata:
        """Every key, with dtype, global shape and chunks of the tensors."""
        found: dict[str, STORAGE_TYPES] = {key: _described(chunks) for key, chunks in self._chunks.items()}
        for values in (self._values, *self._scalars.values()):
            for key, value in values.items():
                found[key] = _described([tensor_spec(key, value)]) if isinstance(value, torch.Tensor) else BytesStorageMetadata()
        return Metadata(found, planner_data={key: (key,) for key in found})

    def read(self, items: Mapping[int, ReadItem]) -> Iterator[tuple[int, Any]]:
        """For each item, by its number, what it asks for: a tensor of its lengths, or the value that is no tensor.

        Raises:
            DamagedCut, ReplayRefused, BackendError: the source cannot give the rest.
        """
        asked: dict[int, list[tuple[int, ReadItem, Rows | None]]] = {}
        for at, item in items.items():
            key, offsets = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            if (key, offsets) in self._places:
                number, name = self._places[key, offsets]
                asked.setdefault(number, []).append((at, item, _rows(name, item)))
            elif key in self._owner:
                asked.setdefault(self._owner[key], []).append((at, item, None))
            else:
                yield at, _part(self._values[key], item, from_dimension=0)
        wanted = {number: [rows for _, _, rows in of_state if rows is not None] for number, of_state in asked.items()}
        for number, tensors, scalars in self._parts.read(wanted):
            given, values = iter(tensors), flattened(self._keys.scalars(number, scalars))
            for at, item, rows in asked[number]:
                if rows is None:
                    yield at, _part(values[item.storage_index.fqn], item, from_dimension=0)
                else:
                    yield at, _part(next(given), item, from_dimension=1)


def flattened(values: dict[str, Any]) -> dict[str, Any]:
    """Values with the keys that DCP gives them where tensors are nested in them."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(values)
    return planner.state_dict


def _described(chunks: Sequence[TensorSpec]) -> TensorStorageMetadata:
    held = [ChunkStorageMetadata(torch.Size(spec.offsets), torch.Size(spec.shape)) for spec in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype_of(chunks[0].dtype)), torch.Size(chunks[0].global_shape), held)


def _rows(name: str, item: ReadItem) -> Rows:
    if not item.lengths:
        return Rows(name, 0, 1)
    return Rows(name, item.storage_offsets[0], item.storage_offsets[0] + item.lengths[0])


def _part(value: Any, item: ReadItem, *, from_dimension: int) -> Any:
    """The part of a tensor that is asked for, its rows cut already where `from_dimension` is 1; any other value whole."""
    if isinstance(value, torch.Tensor):
        for dimension in range(from_dimension, value.dim()):
            value = value.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
    return value

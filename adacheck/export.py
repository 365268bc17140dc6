"""Writes a cut to a directory for others to load: sharded safetensors, a `torch.distributed.checkpoint` folder, or one torch file.

Whatever the format, what was written is read back and compared with the cut, tensor by tensor, before anybody is told that it is
there. This is the one module that writes pickle, because those two formats are made of it; nothing here is ever read from a store.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from adacheck.backends.base import Buffer
from adacheck.backends.object_store import ObjectStore
from adacheck.capture import extra_state, opaque
from adacheck.contents import flattened
from adacheck.digest import tensor_digest_of_bytes
from adacheck.errors import ConfigError, DamagedCut, ExportFailed
from adacheck.export_format import Format as Format
from adacheck.export_optimizer import optimizer_state_dicts
from adacheck.export_values import loadable, summary
from adacheck.flat_keys import FlatKeys, extra_states
from adacheck.full_checkpoint import CutId, StateSource, write_full
from adacheck.full_reader import read_full
from adacheck.opaque_object import opaque_object
from adacheck.recovery import Cut
from adacheck.states import State, dtype_name, segment_ranges, tensor_bytes
from adacheck.tiling import several_optimizers, tensor_key

Progress = Callable[[int], None]
"""Told how many bytes were written or compared since the last call."""

TORCH_FILE, DESCRIPTION = "checkpoint.pt", "restored.json"


@dataclass(frozen=True)
class Export:
    """A cut on its way out.

    Attributes:
        cut: as read, every byte verified.
        name: whose cut it is.
        names: renamed parameters, old name -> new.
    """

    cut: Cut
    name: CutId
    names: Mapping[str, str]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor under its key, as `get_state_dict(..., flatten_optimizer_state_dict=True)` names it; tied ones once."""
        return {key: self.cut.states[number].tensors[name] for key, number, name in self._keys().tensors()}

    def flat(self) -> dict[str, Any]:
        """The whole state dict: tensors, tied ones under all names, optimizer scalars, hyperparameters, modules' extra state."""
        keys, states = self._keys(), self.cut.states
        found: dict[str, Any] = self.tensors()
        found.update({key: states[number].tensors[name] for key, number, name in keys.tied()})
        for number, state in sorted(states.items()):
            found.update(keys.scalars(number, state.scalars))
        return found | keys.hyperparameters(self.cut.opaque, self.names) | extra_states(self.cut.opaque, self.names)

    def _keys(self) -> FlatKeys:
        return FlatKeys({number: state.spec for number, state in self.cut.states.items()})

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(state.size_bytes for state in self.cut.states.values())


def rename(cut: Cut, rules: Mapping[str, str]) -> tuple[Cut, dict[str, str]]:
    """The cut with other names for its parameters, and old name -> new for those that changed.

    Args:
        rules: old name -> new; an old one that ends with a dot is a prefix.

    Raises:
        ConfigError: a rule fits no name of the cut, or two parameters would have one name.
    """
    names = [name for state in cut.states.values() for name in (state.spec.fqn, *state.spec.aliases)]
    names += extra_state.by_key(cut.opaque)
    changed: dict[str, str] = {}
    for old, new in rules.items():
        fitting = [name for name in names if name == old or (old.endswith(".") and name.startswith(old))]
        if not fitting:
            raise ConfigError(
                f"--map-fqn {old}={new}: the cut at step {cut.step} has no {old!r}; its first names are {', '.join(names[:5])}"
            )
        changed.update({name: new + name.removeprefix(old) for name in fitting})
    after = [changed.get(name, name) for name in names]
    doubled = sorted({name for name in after if after.count(name) > 1})
    if doubled:
        raise ConfigError(f"--map-fqn would give the name {doubled[0]!r} to two parameters of the cut at step {cut.step}")

    def with_new(state: State) -> State:
        aliases = tuple(changed.get(alias, alias) for alias in state.spec.aliases)
        return replace(state, spec=replace(state.spec, fqn=changed.get(state.spec.fqn, state.spec.fqn), aliases=aliases))

    return replace(cut, states={number: with_new(state) for number, state in cut.states.items()}), changed


def write(export: Export, directory: Path, kind: Format, progress: Progress) -> dict[str, Any]:
    """Write the cut into `directory`, which exists and is empty; read it back, compare, and describe it in `restored.json`.

    Gives the description: `version` (1), `run`, `step`, `source`, `tier`, `proven`, `exact`, `format`, `renamed`, and for each tensor its
    `dtype`, `shape` and `digest` (the two-level digest of FORMAT.md).

    Raises:
        DamagedCut: what was written is not what was to be written.
        ExportFailed: torch could not write it, for want of space or because of a value that the format cannot hold.
    """
    try:
        _WRITERS[kind](export, directory, progress)
    except (RuntimeError, CheckpointException) as error:
        raise ExportFailed(f"step {export.cut.step} cannot be written to {directory} as {kind}: {error}") from error
    if kind is not Format.SAFETENSORS:
        content, _ = opaque_object(list(export.cut.opaque.items()))
        _store(directory / "opaque.msgpack", content)
    decoded = {name: summary(opaque.decode(content)) for name, content in export.cut.opaque.items()}
    _store(directory / "opaque.json", json.dumps(decoded, indent=1).encode())
    described = describe(export, kind)
    _store(directory / DESCRIPTION, json.dumps(described, indent=1).encode())
    return described


def describe(export: Export, kind: Format) -> dict[str, Any]:
    """What `restored.json` says."""
    tensors = {
        key: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "digest": _digest(tensor).hex()}
        for key, tensor in export.tensors().items()
    }
    cut = export.cut
    head = {
        "version": 1,
        "run": export.name.run,
        "step": cut.step,
        "source": cut.source,
        "tier": str(cut.kind),
        "proven": cut.proven,
        "exact": cut.exact,
    }
    return {**head, "format": str(kind), "renamed": dict(export.names), "tensors": tensors}


def _write_safetensors(export: Export, directory: Path, progress: Progress) -> None:
    """Exactly the folder of a full checkpoint, manifest included."""
    cut = export.cut
    with ObjectStore(f"file://{directory}") as store:
        sources = [_source(state, progress) for _, state in sorted(cut.states.items())]
        entry = write_full(store, export.name, sources, list(cut.opaque.items()), certificates=cut.certificates)
        reader = read_full(store, entry)
        written: dict[str, torch.Tensor] = {}
        several = several_optimizers(reader.manifest.states)
        for at, spec in enumerate(reader.manifest.states):
            for tensor in spec.tensors:
                key = tensor_key(spec, tensor.name, several)
                _compare(key, export.tensors()[key], reader.tensor(at, tensor.name), progress)
                written[key] = export.tensors()[key]
        if reader.opaque() != cut.opaque or written.keys() != export.tensors().keys():
            raise DamagedCut(f"{directory}: opaque items or tensors were not written as they are in the cut; try again")
    folder = directory / entry.folder
    for path in sorted(folder.iterdir()):
        path.rename(directory / path.name)
    for empty in (folder, *list(folder.parents)[: len(Path(entry.folder).parts) - 1]):
        empty.rmdir()


def _source(state: State, progress: Progress) -> StateSource:
    described = {tensor.name: tensor for tensor in state.spec.tensors}

    def read(name: str) -> Iterator[Buffer]:
        view, size = tensor_bytes(state.tensors[name]), state.tensors[name].element_size()
        for start, stop in segment_ranges(described[name]):
            yield view[start * size : stop * size]
            progress((stop - start) * size)

    return StateSource(state.spec, read, state.digest())


def _write_dcp(export: Export, directory: Path, progress: Progress) -> None:
    flat = flattened(export.flat())
    read = {key: torch.empty_like(value) if isinstance(value, torch.Tensor) else None for key, value in flat.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which `no_dist` says already
        state_dict_saver.save(flat, checkpoint_id=directory, no_dist=True)
        progress(export.size_bytes)
        state_dict_loader.load(read, checkpoint_id=directory, no_dist=True)
    _compare_flat(flat, read, progress)


def _write_torch(export: Export, directory: Path, progress: Progress) -> None:
    flat = export.flat()
    parts = {part: {k.removeprefix(f"{part}."): v for k, v in flat.items() if k.startswith(f"{part}.")} for part in ("model", "optim")}
    decoded = {name: loadable(opaque.decode(content)) for name, content in export.cut.opaque.items()}
    optimizers = optimizer_state_dicts(export.cut, export.names)
    own = next(iter(optimizers.values())) if len(optimizers) == 1 else optimizers
    path = directory / TORCH_FILE
    with path.open("wb") as file:
        torch.save({**parts, "optimizer": own, "opaque": decoded}, file)  # torch stores a tensor that is in two places once
        file.flush()
        os.fsync(file.fileno())
    progress(export.size_bytes)
    read = torch.load(path, mmap=True, weights_only=False)  # our own file, of a moment ago; `io.BytesIO` needs it
    _compare_flat(flat, {f"{part}.{key}": value for part in parts for key, value in read[part].items()}, progress)


_WRITERS = {Format.SAFETENSORS: _write_safetensors, Format.DCP: _write_dcp, Format.TORCH: _write_torch}


def _compare_flat(wanted: Mapping[str, Any], read: Mapping[str, Any], progress: Progress) -> None:
    if wanted.keys() != read.keys():
        raise DamagedCut(f"what was written has other keys than the cut: {sorted(wanted.keys() ^ read.keys())[:5]}; try again")
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            _compare(key, value, read[key], progress)
        elif opaque.encode(key, value) != opaque.encode(key, read[key]):
            raise DamagedCut(f"{key} was written as {read[key]!r}, it is {value!r} in the cut; try again")


def _compare(key: str, wanted: torch.Tensor, read: torch.Tensor, progress: Progress) -> None:
    if (wanted.dtype, wanted.shape) != (read.dtype, read.shape) or _digest(wanted) != _digest(read):
        raise DamagedCut(f"{key} was read back with other bytes than it was written with; the disk or the memory is at fault: try again")
    progress(wanted.numel() * wanted.element_size())


def _digest(tensor: torch.Tensor) -> bytes:
    return tensor_digest_of_bytes(tensor_bytes(tensor.contiguous()))


def _store(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())

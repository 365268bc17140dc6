"""Replays recorded optimizer events on shadows, in place, with the recorded kernel: torch's own optimizer code, none of the user's.

An optimizer is made without its constructor and its step called below torch's hooks, so neither the hooks a script registers for
all optimizers nor ours in `capture` fire here, and no class is patched that the trainer uses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer

from adacheck.capture import opaque
from adacheck.errors import ReplayRefused
from adacheck.kernel import ATTRIBUTE, WIDE, environment, implementation_of, refusal
from adacheck.manifests.record import Kernel, StateSpec
from adacheck.optimizers import Declaration, declaration
from adacheck.states import State, tensor_spec
from adacheck.threads import arithmetic

BATCH_BYTES = 8 << 20
"""Gradient bytes to replay at a time: what was just widened is then still in the cache when the step reads it (measured best)."""

_ALIGN = 64
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Replayed:
    """One state's part in one optimizer event.

    Attributes:
        state: the shadow, on CPU; stepped in place, and given the tensors that the optimizer makes at its first step.
        hyperparameters: of its group, as recorded at the event; states of one group share one mapping.
        gradient: what the optimizer was given, of the parameter's shape; may be overwritten.
    """

    state: State
    hyperparameters: Mapping[str, Any]
    gradient: torch.Tensor


class Replayer:
    """Applies optimizer events to shadows; belongs to one thread, which it changes only while it steps."""

    def __init__(self) -> None:
        self._optimizers: dict[str, tuple[Optimizer, Callable[[Optimizer], object]]] = {}
        self._accepted: set[Kernel] = set()  # kernels that this process can run whatever its settings, which alone may change

    def apply(self, event_kernel: Kernel, batch: Sequence[Replayed]) -> None:
        """Step every state of `batch` once; each has one gradient. How an event's states are batched does not change any bit.

        Raises:
            ReplayRefused: the event's kernel cannot be had here (nothing was changed), or torch's step raised (the states of the
                batch are then undefined).
        """
        self._check(event_kernel)
        for threads, groups in _parts(event_kernel, batch).items():
            self._step(event_kernel, threads, groups)

    def _check(self, kernel: Kernel) -> None:
        if kernel in self._accepted:
            return
        reason = refusal(kernel, environment())
        if reason is not None:
            raise ReplayRefused(f"gradients cannot be replayed here: {reason}; restore on a machine and build like the recorded one")
        known = declaration(kernel.optimizer_class)
        if isinstance(known, Declaration) and not known.settings:
            self._accepted.add(kernel)

    def _step(self, kernel: Kernel, threads: int, groups: Sequence[_Group]) -> None:
        optimizer, step = self._optimizer(kernel.optimizer_class)
        members = [member for group in groups for member in group.members]
        optimizer.param_groups = [_attach(group) for group in groups]
        attributes = _attributes(members[0].hyperparameters)
        vars(optimizer).update(attributes)
        entries = defaultdict(dict, {member.state.tensors["param"]: _optimizer_entries(member.state) for member in members})
        optimizer.state = entries
        try:
            with arithmetic(threads, kernel.flush_denormal):
                step(optimizer)
        except (RuntimeError, TypeError, ValueError, AssertionError, KeyError, IndexError) as error:
            names = ", ".join(member.state.spec.fqn for member in members[:3])
            raise ReplayRefused(f"torch could not replay {kernel.optimizer_class} on {names}, …: {error}") from error
        finally:
            for member in members:
                member.state.tensors["param"].grad = None
            optimizer.param_groups, optimizer.state = [], defaultdict(dict)
            for name in attributes:
                delattr(optimizer, name)
        for member in members:
            _take_entries(member.state, entries[member.state.tensors["param"]])

    def _optimizer(self, name: str) -> tuple[Optimizer, Callable[[Optimizer], object]]:
        """An instance of a declared class, and its step function below torch's hooks."""
        if name not in self._optimizers:
            known = declaration(name)
            assert isinstance(known, Declaration), "a kernel that was not refused has a declared class"
            optimizer = known.blank()
            step: Any = known.kind.step
            while getattr(step, "hooked", False):
                step = step.__wrapped__
            self._optimizers[name] = (optimizer, step)
        return self._optimizers[name]


def batches(items: Iterable[_T], size_bytes: Callable[[_T], int], limit_bytes: int = BATCH_BYTES) -> Iterator[list[_T]]:
    """Cut items into runs of at most `limit_bytes` (an item larger than that is alone), in order."""
    batch: list[_T] = []
    batch_bytes = 0
    for item in items:
        size = size_bytes(item)
        if batch and batch_bytes + size > limit_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size
    if batch:
        yield batch


class GradientMemory:
    """Room for the gradients of one batch after the other, so that large tensors are not mapped and unmapped each time."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
        """Tensors of these shapes and dtypes, contents undefined, valid until the next `take`. Keeps the largest batch's bytes."""
        sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN for shape, dtype in wanted]
        if sum(sizes) > self._flat.numel():
            self._flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        views = {dtype: self._flat[: self._flat.numel() // _ALIGN * _ALIGN].view(dtype) for dtype in {dtype for _, dtype in wanted}}
        tensors, at = [], 0
        for (shape, dtype), size in zip(wanted, sizes, strict=True):
            start = at // dtype.itemsize
            tensors.append(views[dtype][start : start + math.prod(shape)].view(shape))
            at += size
        return tensors


def replay_threads(recorded: Kernel, implementation: str, parameter: torch.dtype) -> int:
    """Threads to replay with: one where any number gives the same bits (measured: `tests/test_replay.py`), else as recorded.

    Loop and foreach kernels below fp32 round differently in the last vector of each thread's part, so there the count matters; sums
    and products over a whole tensor may be cut by threads.
    """
    known = declaration(recorded.optimizer_class)
    elementwise = isinstance(known, Declaration) and known.elementwise
    return 1 if elementwise and (implementation == "fused" or parameter in WIDE) else recorded.threads


def spec_of(spec: StateSpec, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> StateSpec:
    """`spec` with its tensors and scalars as they are now, a tensor already known keeping its place in its global tensor.

    A new tensor of the parameter's shape takes the parameter's place; any other (`step`) is whole.
    """
    known = {tensor.name: tensor for tensor in spec.tensors}
    described = []
    for name in ("param", *sorted(tensors.keys() - {"param"})):
        fresh = tensor_spec(name, tensors[name])
        like = known.get(name, known["param"])
        if like.shape == fresh.shape:
            fresh = replace(fresh, global_shape=like.global_shape, offsets=like.offsets)
        described.append(fresh)
    packed = opaque.encode(f"optimizer entries of {spec.fqn}", dict(scalars)) if scalars else b""
    return replace(spec, tensors=tuple(described), scalars=packed)


@dataclass(slots=True)
class _Group:
    """The members of a batch that were in one parameter group, and what ran for it."""

    hyperparameters: Mapping[str, Any]
    implementation: str
    members: list[Replayed] = field(default_factory=list)


def _parts(kernel: Kernel, batch: Sequence[Replayed]) -> dict[int, list[_Group]]:
    """The batch by threads to replay with, then by group: members whose groups or dtypes differ may need other counts."""
    groups: dict[tuple[int, torch.dtype], _Group] = {}
    parts: dict[int, list[_Group]] = {}
    for member in batch:
        dtype = member.state.tensors["param"].dtype
        identity = (id(member.hyperparameters), dtype)
        if identity not in groups:
            implementation = implementation_of(kernel.optimizer_class, member.hyperparameters, [member.state.tensors["param"]])
            groups[identity] = _Group(member.hyperparameters, implementation)
            parts.setdefault(replay_threads(kernel, implementation, dtype), []).append(groups[identity])
        groups[identity].members.append(member)
    return parts


def _attach(group: _Group) -> dict[str, Any]:
    """A parameter group of torch with the gradients attached; the implementation is what ran, not what torch would choose here."""
    parameters = []
    for member in group.members:
        parameter = member.state.tensors["param"]
        parameter.grad = member.gradient
        parameters.append(parameter)
    chosen = {"fused": group.implementation == "fused", "foreach": group.implementation == "foreach"}
    entries = {name: entry for name, entry in group.hyperparameters.items() if not name.startswith(ATTRIBUTE)}
    return {**entries, **{name: choice for name, choice in chosen.items() if name in entries}, "params": parameters}


def _attributes(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """What was recorded of the optimizer itself, the same for all groups of an event."""
    return {name.removeprefix(ATTRIBUTE): value for name, value in hyperparameters.items() if name.startswith(ATTRIBUTE)}


def _optimizer_entries(state: State) -> dict[str, Any]:
    """What `optimizer.state` holds for this parameter."""
    return {name: tensor for name, tensor in state.tensors.items() if name != "param"} | state.scalars


def _take_entries(state: State, entries: Mapping[str, Any]) -> None:
    """Put what the step made or replaced back into the state; steps in place, without entries that are no tensors, leave nothing to do."""
    same = state.tensors.keys() == {"param", *entries} and all(state.tensors[name] is entry for name, entry in entries.items())
    if same and not state.scalars:
        return
    made = {"param": state.tensors["param"]}
    made.update({name: entry for name, entry in sorted(entries.items()) if isinstance(entry, torch.Tensor)})
    scalars = {name: entry for name, entry in entries.items() if name not in made}
    state.tensors.clear()
    state.tensors.update(made)
    state.scalars = scalars
    state.spec = spec_of(state.spec, made, scalars)

"""What the user's model and optimizer consist of, by name: the live states, in one order on every start.

A parameter and its optimizer tensors are one state; tied parameters are one state with several names; buffers are states of their
own. Names are the model's, without what wrappers add (`module.`, `_orig_mod.`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from adacheck.capture import opaque
from adacheck.capture.extra_state import ExtraStates
from adacheck.capture.plain_names import plain_name
from adacheck.errors import ConfigError, UnsupportedTensor
from adacheck.manifests.record import StateSpec
from adacheck.states import local_tensor, refuse_unstorable, tensor_spec

Models = torch.nn.Module | Iterable[torch.nn.Module] | Mapping[str, torch.nn.Module]
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


@dataclass(eq=False)
class LiveState:
    """One state as the trainer holds it.

    Attributes:
        state: its number in the chain.
        fqn, aliases, kind: as in `StateSpec`; kind `transient` is a buffer that `state_dict()` leaves out.
        owner: module whose buffer it is and the buffer's name there, `None` for parameters.
        parameter: the parameter (or the buffer, at the last look).
        optimizer_name, optimizer: who steps it, or did and still keeps entries for it; `""` and `None` for nobody.
    """

    state: int
    fqn: str
    aliases: tuple[str, ...]
    kind: str
    parameter: torch.Tensor
    owner: tuple[torch.nn.Module, str] | None = None
    optimizer_name: str = ""
    optimizer: torch.optim.Optimizer | None = None

    def current(self) -> torch.Tensor:
        """The tensor now: a module may have rebound its buffer."""
        if self.owner is not None:
            module, name = self.owner
            self.parameter = getattr(module, name)
        return self.parameter

    def optimizer_entries(self) -> Mapping[str, Any]:
        """The optimizer's entries for this parameter; empty before its first step (and never created by looking)."""
        if self.optimizer is None or self.parameter not in self.optimizer.state:
            return {}
        entries: Mapping[str, Any] = self.optimizer.state[self.parameter]
        return entries

    def tensors(self) -> dict[str, torch.Tensor]:
        """All its tensors as this rank holds them, `param` first, then the optimizer's by name."""
        found = {"param": local_tensor(self.current(), self.fqn)}
        entries = self.optimizer_entries()
        for name in sorted(name for name, entry in entries.items() if isinstance(entry, torch.Tensor)):
            if name == "param":
                raise UnsupportedTensor(f"the optimizer of {self.fqn} keeps a tensor called 'param', a name adacheck needs itself")
            found[name] = local_tensor(entries[name], f"optimizer entry {name!r} of {self.fqn}")
        return found

    def scalars(self) -> dict[str, Any]:
        """The optimizer's entries that are no tensors."""
        return {name: entry for name, entry in self.optimizer_entries().items() if not isinstance(entry, torch.Tensor)}

    def spec(self, scalars: bytes) -> StateSpec:
        """Describe it; `scalars` is the encoded form of `self.scalars()`."""
        tensors = tuple(tensor_spec(name, tensor) for name, tensor in self.tensors().items())
        requires_grad = self.kind == "parameter" and self.parameter.requires_grad
        return StateSpec(self.state, self.fqn, self.aliases, self.kind, self.optimizer_name, requires_grad, tensors, scalars)


@dataclass
class Inventory:
    """Every live state, and the numbers that names have in this chain.

    Attributes:
        models, optimizers: what was attached, by name (`""` and `optim` where there is one of them).
        numbers: fqn -> state number; kept over restarts of one generation, extended by new names.
        states, by_parameter, by_optimizer: the live states by number, by `id` of their parameter, and by who steps them.
        given: each optimizer's hyperparameters as the script had set them when it attached, encoded, by group.
        unowned: parameters that get or have gradients and are in no attached optimizer.
        masters: states of parameters that an optimizer steps and no model has, which may be copies of others in another precision.
        extra_states: what modules keep besides tensors.
    """

    models: dict[str, torch.nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    numbers: dict[str, int] = field(default_factory=dict)
    states: dict[int, LiveState] = field(default_factory=dict)
    by_parameter: dict[int, LiveState] = field(default_factory=dict)
    by_optimizer: dict[str, list[LiveState]] = field(default_factory=dict)
    given: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    unowned: list[LiveState] = field(default_factory=list)
    masters: frozenset[int] = frozenset()
    extra_states: ExtraStates = field(default_factory=ExtraStates)

    def refresh(self) -> None:
        """Look again: names of all parameters, buffers, and what the optimizers hold besides (cheap; called at every step)."""
        names, self.extra_states = _Names(self.numbers), ExtraStates()
        for prefix, model in self.models.items():
            self._collect(prefix, model, names)
        of_models = set(names.found)
        for name, optimizer in self.optimizers.items():
            self._collect_optimizer(name, optimizer, names)
        self.masters = frozenset(names.found[key].state for key in names.found.keys() - of_models)
        self.states = {live.state: live for live in names.found.values()}
        self.by_parameter = names.found
        self.by_optimizer = {name: [] for name in ("", *self.optimizers)}
        for live in self.states.values():
            self.by_optimizer[live.optimizer_name].append(live)
        unowned = (live for live in self.by_optimizer[""] if live.kind == "parameter")
        self.unowned = [live for live in unowned if live.parameter.requires_grad or live.parameter.grad is not None]

    def expected_bytes(self) -> tuple[int, int]:
        """Bytes of the gradients of one step, and of all states: those there are, or those torch's optimizers will make, if more."""
        there = sum(_bytes(tensor) for live in self.states.values() for tensor in live.tensors().values())
        groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        gradients = [sum(_bytes(parameter) for parameter in group["params"]) for group in groups]
        return sum(gradients), max(there, sum(size * _tensors_of(group) for size, group in zip(gradients, groups, strict=True)))

    def signature(self, name: str) -> tuple[int, ...]:
        """Changes when a group, a parameter or an optimizer's list of them changes: then `refresh` is due."""
        groups = self.optimizers[name].param_groups
        return (*(id(p) for group in groups for p in group["params"]), -1, *(len(group["params"]) for group in groups))

    def empty_slots(self) -> dict[str, tuple[torch.nn.Module, str]]:
        """Names under which a module has registered a buffer and not made it yet (it is `None`), with where it belongs."""
        return {
            prefix + plain_name(f"{path}.{name}" if path else name): (module, name)
            for prefix, model in self.models.items()
            for path, module in model.named_modules(remove_duplicate=False)
            for name, buffer in module._buffers.items()
            if buffer is None
        }

    def sharing(self, written: Collection[int]) -> frozenset[int]:
        """States whose parameter or buffer lies in memory that is written under another name, where not all writes are seen.

        Args:
            written: the states that were seen to be written; those of optimizers are taken to be.
        """
        spans = sorted((*span_of(live.current()), live.optimizer is not None or n in written, n) for n, live in self.states.items())
        found: set[int] = set()
        end, trained, last = 0, False, -1
        for start, stop, steps, number in spans:
            if start < end and (trained or steps):
                found |= {number, last}
            if stop > end:
                end, trained, last = stop, steps or (trained and start < end), number
        return frozenset(found)

    def inference(self) -> frozenset[int]:
        """States with inference tensors, which have no version counter."""
        return frozenset(number for number, live in self.states.items() if any(t.is_inference() for t in live.tensors().values()))

    def _collect(self, prefix: str, model: torch.nn.Module, names: _Names) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        parameters = list(model.named_parameters(remove_duplicate=False))
        buffers = list(model.named_buffers(remove_duplicate=False))
        self.extra_states.look(prefix, modules)
        names.raw = {name for name, _ in (*parameters, *buffers)}
        for raw_name, parameter in parameters:
            names.add(prefix, raw_name, "parameter", parameter, None)
        for raw_name, buffer in buffers:
            module_name, _, name = raw_name.rpartition(".")
            module = modules[module_name]
            kind = "transient" if name in module._non_persistent_buffers_set else "buffer"
            names.add(prefix, raw_name, kind, buffer, (module, name))

    def _collect_optimizer(self, optimizer_name: str, optimizer: torch.optim.Optimizer, names: _Names) -> None:
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                live = names.found.get(id(parameter)) or names.add(f"{optimizer_name}.", f"{g}.{i}", "parameter", parameter, None)
                if live.optimizer is not None and live.optimizer is not optimizer:
                    raise ConfigError(
                        f"parameter {live.fqn} is in optimizers {live.optimizer_name!r} and {optimizer_name!r}; give it to one of them"
                    )
                live.optimizer_name, live.optimizer = optimizer_name, optimizer
        for key in optimizer.state:  # of parameters that are in no group any more: they may be put back, and then it counts again
            orphan = names.found.get(id(key))
            if orphan is not None and orphan.optimizer is None:
                orphan.optimizer_name, orphan.optimizer = optimizer_name, optimizer


@dataclass
class _Names:
    """What one look finds: each tensor once, under a name that no other tensor has. `raw` are the model's own names."""

    numbers: dict[str, int]
    raw: set[str] = field(default_factory=set)
    found: dict[int, LiveState] = field(default_factory=dict)
    taken: dict[str, LiveState] = field(default_factory=dict)

    def add(self, prefix: str, raw_name: str, kind: str, tensor: torch.Tensor, owner: tuple[torch.nn.Module, str] | None) -> LiveState:
        """Note a tensor under its plain name; where that belongs to another one, `module.` was no wrapper, and it keeps the raw one."""
        known = self.found.get(id(tensor))
        plain = plain_name(raw_name)
        fqn = prefix + (raw_name if plain != raw_name and plain in self.raw else plain)
        if self.taken.get(fqn, known) is not known:
            fqn = prefix + raw_name
            if self.taken.get(fqn, known) is not known:
                raise ConfigError(f"two different tensors are called {fqn} (one is a {self.taken[fqn].kind}); rename a module or a model")
        if known is not None:
            if fqn != known.fqn and fqn not in known.aliases:
                known.aliases = (*known.aliases, fqn)
                self.taken[fqn] = known
            return known
        if tensor.is_meta:
            refuse_unstorable(tensor, fqn)
        number = self.numbers.get(fqn)
        if number is None:
            number = self.numbers[fqn] = max(self.numbers.values(), default=-1) + 1
        live = self.found[id(tensor)] = self.taken[fqn] = LiveState(number, fqn, (), kind, tensor, owner)
        return live


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that a tensor's elements lie between; strides and gaps count as used."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * abs(stride) for size, stride in zip(local.shape, local.stride(), strict=True)) + 1
    return local.data_ptr(), local.data_ptr() + reach * local.element_size()


def named(value: Any, kind: type, single: str, what: str) -> dict[str, Any]:
    """One, a list or a dict of models or optimizers, as a dict.

    Raises:
        ConfigError: `value` is something else, or an empty collection.
    """
    if isinstance(value, kind):
        return {single: value}
    items = dict(value) if isinstance(value, Mapping) else {str(i): v for i, v in enumerate(value)} if isinstance(value, Iterable) else {}
    for name, item in items.items():
        if not isinstance(item, kind) or not isinstance(name, str) or not name:
            raise ConfigError(f"{what} {name!r} is a {type(item).__name__}, not a {kind.__name__}")
    if not items:
        raise ConfigError(f"{what} must be a {kind.__name__}, a list or a dict of them; got {type(value).__name__}")
    return items


def take_inventory(model: Models, optimizer: Optimizers) -> Inventory:
    """Everything that is to be checkpointed, by name."""
    models = named(model, torch.nn.Module, "", "model")
    optimizers = named(optimizer, torch.optim.Optimizer, "optim", "optimizer")
    if not isinstance(model, torch.nn.Module):
        models = {f"{name}.": m for name, m in models.items()}
    inventory = Inventory(models, optimizers)
    inventory.refresh()
    for live in inventory.states.values():
        refuse_unstorable(live.current(), live.fqn)
        for name, entry in live.optimizer_entries().items():
            if isinstance(entry, torch.Tensor):
                refuse_unstorable(entry, f"optimizer entry {name!r} of {live.fqn}")
    for name, each in optimizers.items():
        groups = [{key: value for key, value in group.items() if key != "params"} for group in each.param_groups]
        inventory.given[name] = tuple(opaque.encode(f"optimizer {name!r}", group) for group in groups)
    return inventory


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors_of(group: dict[str, Any]) -> int:
    """How many tensors of a parameter's size its state has at most, itself among them."""
    return 4 if group.get("amsgrad") or (group.get("centered") and group.get("momentum")) else 3

"""Writes a cut into the user's model, optimizer and `extra`: first everything is compared, then everything is written.

Bytes go into state tensors directly; `optimizer.load_state_dict` would cast fp32 moments of bf16 parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from adacheck.capture import opaque
from adacheck.capture.inventory import Inventory, LiveState
from adacheck.capture.rng import install_rng, rng_state
from adacheck.errors import StateMismatch
from adacheck.recovery import Cut
from adacheck.same import same_bytes
from adacheck.states import State, dtype_name, local_tensor

_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""Entries that learning-rate schedulers add to parameter groups."""

RNG, OPTIMIZER, EXTRA = "rng", "optimizer/", "extra/"


class Stateful(Protocol):
    """Anything that `extra` takes."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def opaque_items(inventory: Inventory, extra: Mapping[str, Stateful]) -> list[tuple[str, bytes]]:
    """RNG, hyperparameters and `extra` as they are now, encoded.

    Raises:
        UnsupportedTensor: an item of `extra` cannot be stored without loss; names where it sits.
    """
    items = [(RNG, opaque.encode(RNG, rng_state()))]
    for name, optimizer in inventory.optimizers.items():
        items.append((OPTIMIZER + name, opaque.encode(OPTIMIZER + name, _groups(inventory, optimizer))))
    items += [(EXTRA + name, opaque.encode(EXTRA + name, item.state_dict())) for name, item in extra.items()]
    return items


def _groups(inventory: Inventory, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {"names": [inventory.by_parameter[id(p)].fqn for p in group["params"]], "values": {k: v for k, v in group.items() if k != "params"}}
        for group in optimizer.param_groups
    ]


def install(cut: Cut, inventory: Inventory, extra: Mapping[str, Stateful]) -> None:
    """Make model, optimizer, `extra` and the generators what they were at the cut; afterwards live bytes equal the cut's.

    Raises:
        StateMismatch: something differs in name, shape, dtype or groups; names all of it, and nothing was written.
    """
    inventory.numbers = {state.spec.fqn: number for number, state in cut.states.items()}
    inventory.refresh()
    decoded = {name: opaque.decode(content) for name, content in cut.opaque.items()}
    problems = [*_state_problems(cut, inventory), *_group_problems(decoded, inventory), *_extra_problems(decoded, extra)]
    if problems:
        listed = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise StateMismatch(f"the script does not match the cut at step {cut.step} from {cut.source}:\n  {listed}")
    with torch.no_grad():
        for number, state in cut.states.items():
            _write_state(inventory.states[number], state)
    for name, optimizer in inventory.optimizers.items():
        _write_groups(optimizer, decoded[OPTIMIZER + name])
    for name, item in extra.items():
        item.load_state_dict(decoded[EXTRA + name])
    install_rng(decoded[RNG])
    inventory.refresh()
    _check(cut, inventory)


def _state_problems(cut: Cut, inventory: Inventory) -> Iterable[str]:
    live = {state.fqn: state for state in inventory.states.values()}
    saved = {state.spec.fqn: state for state in cut.states.values()}
    for name in saved.keys() - live.keys():
        yield f"missing in the script: {name}"
    for name in live.keys() - saved.keys():
        yield f"not in the cut: {name}"
    for name in sorted(live.keys() & saved.keys()):
        spec, tensor = saved[name].spec, local_tensor(live[name].current(), name)
        stored = spec.tensors[0]
        if live[name].kind != "transient" and tuple(tensor.shape) != stored.shape:
            yield f"{name}: shape {list(tensor.shape)} in the script, {list(stored.shape)} in the cut"
        if dtype_name(tensor.dtype) != stored.dtype:
            yield f"{name}: dtype {dtype_name(tensor.dtype)} in the script, {stored.dtype} in the cut"
        if live[name].optimizer_name != spec.optimizer:
            yield f"{name}: in optimizer {live[name].optimizer_name or 'none'} in the script, {spec.optimizer or 'none'} in the cut"


def _group_problems(decoded: Mapping[str, Any], inventory: Inventory) -> Iterable[str]:
    saved_names = {name.removeprefix(OPTIMIZER) for name in decoded if name.startswith(OPTIMIZER)}
    for name in saved_names - inventory.optimizers.keys():
        yield f"missing in the script: optimizer {name!r}"
    for name in inventory.optimizers.keys() - saved_names:
        yield f"not in the cut: optimizer {name!r}"
    for name in saved_names & inventory.optimizers.keys():
        saved = [group["names"] for group in decoded[OPTIMIZER + name]]
        here = [group["names"] for group in _groups(inventory, inventory.optimizers[name])]
        if len(saved) != len(here):
            yield f"optimizer {name!r}: {len(here)} parameter groups in the script, {len(saved)} in the cut"
        elif saved != here:
            at = next(i for i, (a, b) in enumerate(zip(saved, here, strict=True)) if a != b)
            yield f"optimizer {name!r}: group {at} has other parameters, or in another order, than in the cut"
        else:
            yield from _hyperparameter_problems(name, inventory.optimizers[name], decoded[OPTIMIZER + name])


def _hyperparameter_problems(name: str, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> Iterable[str]:
    """Hyperparameters that only one side has: the optimizer is of another class."""
    for here, group in zip(optimizer.param_groups, saved, strict=True):
        gone = group["values"].keys() - here.keys() - _OF_SCHEDULERS
        fresh = optimizer.defaults.keys() - group["values"].keys()
        if gone or fresh:
            only = f"only the cut has {', '.join(sorted(gone)) or 'none'}, only the script {', '.join(sorted(fresh)) or 'none'}"
            yield f"optimizer {name!r}: is a {type(optimizer).__name__} in the script, and of another kind in the cut: {only}"
            return


def _extra_problems(decoded: Mapping[str, Any], extra: Mapping[str, Stateful]) -> Iterable[str]:
    saved = {name.removeprefix(EXTRA) for name in decoded if name.startswith(EXTRA)}
    for name in saved - extra.keys():
        yield f"missing in the script: extra[{name!r}]"
    for name in extra.keys() - saved:
        yield f"not in the cut: extra[{name!r}]"
    if RNG not in decoded:
        yield "not in the cut: the states of the random number generators"


def _write_state(live: LiveState, state: State) -> None:
    parameter, spec = live.current(), state.spec
    source = state.tensors["param"]
    if live.owner is not None and parameter.shape != source.shape:
        setattr(*live.owner, source.to(parameter.device).clone())
    else:
        write_bytes(local_tensor(parameter, live.fqn), source)
    if live.kind == "parameter":
        parameter.requires_grad_(spec.requires_grad)
    if live.optimizer is not None:
        _write_entries(live, state)


def _write_entries(live: LiveState, state: State) -> None:
    assert live.optimizer is not None
    parameter = live.parameter
    names = [tensor.name for tensor in state.spec.tensors if tensor.name != "param"]
    if not names and not state.scalars:
        live.optimizer.state.pop(parameter, None)
        return
    before = live.optimizer.state[parameter]
    entries: dict[str, Any] = dict(state.scalars)
    for name in names:
        source, known = state.tensors[name], before.get(name)
        if isinstance(known, torch.Tensor) and known.shape == source.shape and known.dtype == source.dtype:
            entries[name] = known
        else:
            entries[name] = _like(parameter, source)
        write_bytes(local_tensor(entries[name], name), source)
    live.optimizer.state[parameter] = {name: entries[name] for name in _in_order(before, entries)}


def _in_order(before: Mapping[str, Any], entries: Mapping[str, Any]) -> list[str]:
    fresh = sorted((name for name in entries if name not in before), key=lambda name: (name != "step", name))  # torch's own order
    return [name for name in before if name in entries] + fresh


def _like(parameter: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A fresh optimizer tensor where the optimizer itself would have put it: with its parameter, or on the CPU if it is a counter."""
    if source.dim() == 0 and parameter.dim() != 0:
        return torch.empty_like(source)
    if source.shape == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=source.dtype)
    return torch.empty_like(source, device=parameter.device)


def write_bytes(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another of the same dtype and shape, on any device and of any strides, bit for bit."""
    if destination.numel() == 0:
        return
    if destination.is_contiguous() and destination.device.type == "cpu":
        destination.reshape(-1).view(torch.uint8).copy_(source.reshape(-1).view(torch.uint8))
    else:
        destination.copy_(source)


def _write_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for name, value in values["values"].items():
            known = group.get(name)
            if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor) and known.shape == value.shape:
                known.detach().copy_(value)
            else:
                group[name] = value
        for name in group.keys() - values["values"].keys() - {"params"}:
            del group[name]


def _check(cut: Cut, inventory: Inventory) -> None:
    """After the writing, live bytes are the cut's: else a load hook or an expanded tensor got in between."""
    for number, state in cut.states.items():
        live = inventory.states[number].tensors()
        for name, tensor in state.tensors.items():
            if name not in live or not same_bytes(live[name].cpu().contiguous(), tensor):
                raise StateMismatch(f"{state.spec.fqn}: {name} does not have the bytes of the cut at step {cut.step} after writing them")

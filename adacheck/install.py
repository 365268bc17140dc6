"""Writes a cut into the user's model, optimizer and `extra`: first everything is compared, then everything is written.

Bytes go into state tensors directly; `optimizer.load_state_dict` would cast fp32 moments of bf16 parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any, Protocol

import torch

from adacheck.capture import opaque
from adacheck.capture.accumulated import Gradients
from adacheck.capture.inventory import Inventory
from adacheck.capture.rng import install_rng, rng_state
from adacheck.errors import StateMismatch
from adacheck.optimizers import class_name
from adacheck.own_entries import own_entries, put_own_entries
from adacheck.put_state import can_hold, put_state
from adacheck.recovery import Cut
from adacheck.same import same_bytes
from adacheck.states import dtype_name, local_tensor

_log = logging.getLogger("adacheck")

OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""Entries that learning-rate schedulers add to parameter groups."""

_WAYS_OUT = (
    "nothing was written; change the script back, give a new run another URI, or load what fits with store.reader() "
    "or adacheck-restore --to DIR (--map-fqn renames)"
)

RNG, OPTIMIZER, EXTRA = "rng", "optimizer/", "extra/"
GRADIENT, OWN, UNATTACHED = "gradient/", "own/", "unattached"


class Stateful(Protocol):
    """Anything that `extra` takes."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def opaque_items(
    inventory: Inventory,
    extra: Mapping[str, Stateful],
    gradients: Mapping[str, Any] | None = None,
    unattached: Mapping[str, str] | None = None,
) -> list[tuple[str, bytes]]:
    """RNG, hyperparameters, modules' extra state and `extra` as they are now; gradients still to be used; what a cut does not hold.

    Args:
        gradients: what `Gradients.of_cut` gives.
        unattached: parameters that an optimizer steps which is not attached, with its class.

    Raises:
        UnsupportedTensor: an item of `extra` or a module's extra state cannot be stored without loss; names where it sits.
    """
    items = [(RNG, opaque.encode(RNG, rng_state()))]
    for name, optimizer in inventory.optimizers.items():
        items.append((OPTIMIZER + name, opaque.encode(OPTIMIZER + name, _groups(inventory, name))))
        if own := own_entries(optimizer):
            items.append((OWN + name, opaque.encode(OWN + name, own)))
    items += [(GRADIENT + fqn, opaque.encode(GRADIENT + fqn, gradient)) for fqn, gradient in (gradients or {}).items()]
    if unattached:
        items.append((UNATTACHED, opaque.encode(UNATTACHED, dict(unattached))))
    items += inventory.extra_states.items()
    items += [(EXTRA + name, opaque.encode(EXTRA + name, item.state_dict())) for name, item in extra.items()]
    return items


def _groups(inventory: Inventory, name: str) -> list[dict[str, Any]]:
    """Of each group its parameters' names, its present hyperparameters and (encoded) those it attached with, and its optimizer's class."""
    groups = inventory.optimizers[name].param_groups
    given = inventory.given.get(name, ())
    return [
        {
            "names": [inventory.by_parameter[id(p)].fqn for p in group["params"]],
            "values": {k: v for k, v in group.items() if k != "params"},
            "given": given[g] if g < len(given) else b"",
            "class": class_name(type(inventory.optimizers[name])),
        }
        for g, group in enumerate(groups)
    ]


def install(cut: Cut, inventory: Inventory, extra: Mapping[str, Stateful], gradients: Gradients) -> None:
    """Make model, optimizer, `extra`, gradients and the generators what they were at the cut; afterwards live bytes equal the cut's.

    Raises:
        StateMismatch: something differs in name, shape, dtype or groups; names all of it, and nothing was written.
    """
    inventory.numbers = {state.spec.fqn: number for number, state in cut.states.items()}
    inventory.refresh()
    decoded = {name: opaque.decode(content) for name, content in cut.opaque.items()}
    problems = [*_state_problems(cut, inventory, decoded), *inventory.extra_states.problems(decoded)]
    problems += [*_group_problems(decoded, inventory), *_extra_problems(decoded, extra)]
    if problems:
        listed = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise StateMismatch(f"the script does not match the cut at step {cut.step} from {cut.source}:\n  {listed}\n{_WAYS_OUT}")
    for name, optimizer in inventory.optimizers.items():
        put_own_entries(optimizer, decoded.get(OWN + name, {}))
        _write_groups(optimizer, decoded[OPTIMIZER + name])
    with torch.no_grad():
        _write_states(cut, inventory)
        gradients.put_back({name.removeprefix(GRADIENT): value for name, value in decoded.items() if name.startswith(GRADIENT)})
    inventory.extra_states.put_back(decoded)
    for name, item in extra.items():
        item.load_state_dict(decoded[EXTRA + name])
    install_rng(decoded[RNG])
    inventory.refresh()
    _check(cut, inventory)
    if unattached := decoded.get(UNATTACHED, {}):
        names, kinds = sorted(unattached), sorted(set(unattached.values()))
        _log.warning(
            "%s were stepped by optimizers that were not given to store.attach (%s): "
            "their state is not in the cut at step %d, and begins anew",
            ", ".join(names[:3] + ["…"] * (len(names) > 3)),
            ", ".join(kinds),
            cut.step,
        )


def _write_states(cut: Cut, inventory: Inventory) -> None:
    slots = inventory.empty_slots()
    for number, state in cut.states.items():
        live = inventory.states.get(number)
        if live is None:
            setattr(*slots[state.spec.fqn], state.tensors["param"].clone())
            continue
        if live.optimizer is None and state.spec.optimizer:  # in no group, in the cut either, but it still had entries
            live.optimizer = inventory.optimizers[state.spec.optimizer]
        put_state(live, state)


def _state_problems(cut: Cut, inventory: Inventory, decoded: Mapping[str, Any]) -> Iterable[str]:
    live = {state.fqn: state for state in inventory.states.values()}
    saved = {state.spec.fqn: state for state in cut.states.values()}
    slots = inventory.empty_slots()
    grouped = {fqn for name in decoded if name.startswith(OPTIMIZER) for group in decoded[name] for fqn in group["names"]}
    tied_here = {alias: name for name, state in live.items() for alias in state.aliases}
    tied_there = {alias: name for name, state in saved.items() for alias in state.spec.aliases}
    for name in saved.keys() - live.keys():
        if name in tied_here:
            yield f"{name}: tied to {tied_here[name]} in the script, and not in the cut"
        elif name not in slots or saved[name].spec.kind == "parameter":
            yield f"missing in the script: {name}"
    for name in live.keys() - saved.keys():
        tied = tied_there.get(name)
        yield f"{name}: tied to {tied} in the cut, and not in the script" if tied else f"not in the cut: {name}"
    for name in sorted(live.keys() & saved.keys()):
        spec, tensor = saved[name].spec, local_tensor(live[name].current(), name)
        stored = spec.tensors[0]
        if live[name].kind != "transient" and tuple(tensor.shape) != stored.shape:
            yield f"{name}: shape {list(tensor.shape)} in the script, {list(stored.shape)} in the cut"
        if dtype_name(tensor.dtype) != stored.dtype:
            yield f"{name}: dtype {dtype_name(tensor.dtype)} in the script, {stored.dtype} in the cut"
        elif live[name].kind == "parameter" and tensor.shape == stored.shape and not can_hold(tensor, saved[name].tensors["param"]):
            yield f"{name}: expanded in the script, and in the cut its elements differ along that dimension; clone it in the script"
        if live[name].optimizer_name != spec.optimizer and (live[name].optimizer_name or name in grouped):
            yield f"{name}: in optimizer {live[name].optimizer_name or 'none'} in the script, {spec.optimizer or 'none'} in the cut"


def _group_problems(decoded: Mapping[str, Any], inventory: Inventory) -> Iterable[str]:
    saved_names = {name.removeprefix(OPTIMIZER) for name in decoded if name.startswith(OPTIMIZER)}
    for name in saved_names - inventory.optimizers.keys():
        yield f"missing in the script: optimizer {name!r}"
    for name in inventory.optimizers.keys() - saved_names:
        yield f"not in the cut: optimizer {name!r}"
    for name in saved_names & inventory.optimizers.keys():
        saved = [group["names"] for group in decoded[OPTIMIZER + name]]
        here = [group["names"] for group in _groups(inventory, name)]
        if len(saved) != len(here):
            yield f"optimizer {name!r}: {len(here)} parameter groups in the script, {len(saved)} in the cut"
        elif saved != here:
            at = next(i for i, (a, b) in enumerate(zip(saved, here, strict=True)) if a != b)
            ours, theirs = next((a, b) for a, b in zip_longest(here[at], saved[at], fillvalue="its end") if a != b)
            yield f"optimizer {name!r}: group {at} begins to differ at {ours} in the script, {theirs} in the cut"
        else:
            yield from _hyperparameter_problems(name, inventory.optimizers[name], decoded[OPTIMIZER + name])


def _hyperparameter_problems(name: str, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> Iterable[str]:
    """Hyperparameters that only one side has: the optimizer is of another class. One of the same class was given some in mid-run."""
    for here, group in zip(optimizer.param_groups, saved, strict=True):
        if group.get("class") == class_name(type(optimizer)):
            continue
        gone = group["values"].keys() - here.keys() - OF_SCHEDULERS
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


def _write_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for name, value in values["values"].items():
            known = group.get(name)
            if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor) and _alike(known, value):
                known.detach().copy_(value)
            else:
                group[name] = value
        for name in group.keys() - values["values"].keys() - {"params"}:
            del group[name]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _check(cut: Cut, inventory: Inventory) -> None:
    """After the writing, live bytes are the cut's: else a load hook or an expanded tensor got in between."""
    for number, state in cut.states.items():
        live = inventory.states[number].tensors()
        for name, tensor in state.tensors.items():
            if name not in live or not same_bytes(live[name].cpu().contiguous(), tensor):
                raise StateMismatch(f"{state.spec.fqn}: {name} does not have the bytes of the cut at step {cut.step} after writing them")

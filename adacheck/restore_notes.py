"""What a restore has to say: optimizers of another class, settings that the cut overrides, and parameters without optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from adacheck.capture import opaque
from adacheck.capture.inventory import Inventory, LiveState
from adacheck.install import OF_SCHEDULERS, OPTIMIZER
from adacheck.optimizers import class_name
from adacheck.recovery import Cut

NAMED_MAX = 5


def notes(cut: Cut, inventory: Inventory) -> list[str]:
    """At most one line of each kind; call it after the cut was installed."""
    overridden = [line for name in inventory.optimizers for line in _overridden(name, cut, inventory)]
    bare = [line for name in inventory.optimizers if (line := _without_state(name, cut, inventory))]
    said = []
    if overridden:
        said.append(
            f"the cut at step {cut.step} overrides the script: {_some(overridden)}; to change a hyperparameter, set it after restore()"
        )
    return [*(line for name in inventory.optimizers if (line := _of_another_class(name, cut, inventory))), *said, *bare]


def _of_another_class(name: str, cut: Cut, inventory: Inventory) -> str | None:
    """What tells a renamed class from another algorithm is not in the bytes: state and hyperparameters have the same names."""
    saved: list[Mapping[str, Any]] = opaque.decode(cut.opaque[OPTIMIZER + name])
    here, there = class_name(type(inventory.optimizers[name])), next((group.get("class") for group in saved), None)
    if there in (here, None):
        return None
    return (
        f"optimizer {name!r} is now a {here} and was a {there} at the cut at step {cut.step}: it goes on with that one's state and "
        "hyperparameters; unless both compute the same, change the script back or give a new run another URI"
    )


def _overridden(name: str, cut: Cut, inventory: Inventory) -> Iterable[str]:
    """Hyperparameters that this script set otherwise than the one that wrote the cut; what training itself changed is none."""
    saved: list[Mapping[str, Any]] = opaque.decode(cut.opaque[OPTIMIZER + name])
    for g, (group, given) in enumerate(zip(saved, inventory.given.get(name, ()), strict=False)):
        if not group.get("given") or group["given"] == given:
            continue
        before, now = opaque.decode(group["given"]), opaque.decode(given)
        for key in sorted(before.keys() & now.keys() & group["values"].keys() - OF_SCHEDULERS):
            kept = opaque.encode(key, group["values"][key])
            if opaque.encode(key, before[key]) != opaque.encode(key, now[key]) != kept:
                where = f"{key} of optimizer {name!r}" + (f", group {g}," if len(saved) > 1 else "")
                yield f"{where} is {now[key]!r} in the script, was {before[key]!r} before, and stays {group['values'][key]!r}"


def _without_state(name: str, cut: Cut, inventory: Inventory) -> str | None:
    """Parameters whose moments begin at nothing, as they were at the cut."""
    optimizer = inventory.optimizers[name]
    trained = [live for live in inventory.states.values() if live.optimizer is optimizer and live.parameter.requires_grad]
    bare = [live.fqn for live in trained if not live.optimizer_entries() and _keeps_state(live)]
    if not bare or cut.step == 0:
        return None
    what = f"any of the {len(bare)} parameters" if len(bare) == len(trained) else f"{len(bare)} of {len(trained)} parameters"
    return (
        f"the cut at step {cut.step} has no state of optimizer {name!r} ({type(optimizer).__name__}) for {what} it trains, which it had "
        f"not stepped: {_some(bare)}; they begin without"
    )


def _keeps_state(live: LiveState) -> bool:
    """Whether a step of torch's own optimizer would leave state for a parameter."""
    optimizer = live.optimizer
    if optimizer is None or isinstance(optimizer, torch.optim.LBFGS) or not type(optimizer).__module__.startswith("torch.optim"):
        return False  # of LBFGS one parameter has it all; others may keep none
    group = next(group for group in optimizer.param_groups if any(p is live.parameter for p in group["params"]))
    return bool(group.get("momentum", True) or "betas" in group or "alpha" in group)


def _some(lines: list[str]) -> str:
    return ", ".join(lines[:NAMED_MAX]) + (f" and {len(lines) - NAMED_MAX} more" if len(lines) > NAMED_MAX else "")

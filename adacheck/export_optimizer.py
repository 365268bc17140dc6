"""What `optimizer.state_dict()` was at a cut, for scripts that load it without `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adacheck.capture import opaque
from adacheck.export_values import loadable
from adacheck.install import OPTIMIZER
from adacheck.recovery import Cut


def optimizer_state_dicts(cut: Cut, renamed: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Each optimizer's `state_dict()` by the optimizer's name: states by the parameter's position over all groups, as torch numbers them.

    Args:
        renamed: names of parameters that `cut.states` has changed since, old -> new.
    """
    states = {(state.spec.optimizer, state.spec.fqn): state for state in cut.states.values()}
    found: dict[str, dict[str, Any]] = {}
    for item, content in cut.opaque.items():
        if not item.startswith(OPTIMIZER):
            continue
        name = item.removeprefix(OPTIMIZER)
        entries: dict[int, dict[str, Any]] = {}
        groups, first = [], 0
        for group in opaque.decode(content):
            numbers = range(first, first + len(group["names"]))
            for number, fqn in zip(numbers, group["names"], strict=True):
                state = states[name, renamed.get(fqn, fqn)]
                held = {entry: tensor for entry, tensor in state.tensors.items() if entry != "param"} | loadable(state.scalars)
                if held:
                    entries[number] = held
            groups.append({**loadable(group["values"]), "params": list(numbers)})
            first = numbers.stop
        found[name] = {"state": entries, "param_groups": groups}
    return found

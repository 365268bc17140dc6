"""What a cut is called outside: the keys of torch's `get_state_dict(..., flatten_optimizer_state_dict=True)`, under `model.` and `optim.`.

With several optimizers their names are part of the keys, `optim.<name>.`; `module.` and `_orig_mod.` never are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adacheck.capture import extra_state, opaque
from adacheck.install import OPTIMIZER
from adacheck.manifests.record import StateSpec
from adacheck.tiling import several_optimizers, tensor_key


class FlatKeys:
    """The keys of a cut with these states, by number."""

    def __init__(self, specs: Mapping[int, StateSpec]) -> None:
        self._specs = dict(sorted(specs.items()))
        self._several = several_optimizers(list(self._specs.values()))

    def tensors(self) -> Iterator[tuple[str, int, str]]:
        """Key, state and name of every tensor; chunks of one global tensor have one key. Tied parameters come once."""
        for number, spec in self._specs.items():
            for tensor in spec.tensors:
                yield tensor_key(spec, tensor.name, self._several), number, tensor.name

    def tied(self) -> Iterator[tuple[str, int, str]]:
        """The same for the further names of tied parameters."""
        for number, spec in self._specs.items():
            yield from ((f"model.{alias}", number, "param") for alias in spec.aliases)

    def scalars(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's entries of one state that are no tensors, by key."""
        return {tensor_key(self._specs[number], name, self._several): value for name, value in values.items()}

    def hyperparameters(self, items: Mapping[str, bytes], renamed: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Every parameter's hyperparameters by key, from a cut's opaque items; `renamed` gives parameters other names."""
        new = renamed or {}
        found: dict[str, Any] = {}
        for item, content in items.items():
            if not item.startswith(OPTIMIZER):
                continue
            owner = f"{item.removeprefix(OPTIMIZER)}." if self._several else ""
            for group in opaque.decode(content):
                for fqn in group["names"]:
                    prefix = f"optim.{owner}param_groups.{new.get(fqn, fqn)}"
                    found.update({f"{prefix}.{name}": value for name, value in group["values"].items()})
        return found


def extra_states(items: Mapping[str, bytes], renamed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What modules keep besides tensors by key, from a cut's opaque items; `renamed` gives `<module>._extra_state` other names."""
    new = renamed or {}
    return {f"model.{new.get(key, key)}": value for key, value in extra_state.by_key(items).items()}

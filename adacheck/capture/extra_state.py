"""What modules keep besides tensors: `get_extra_state()`, part of torch's own `state_dict()` (fp8 scales, counters)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from adacheck.capture import opaque
from adacheck.capture.plain_names import plain_name
from adacheck.errors import ConfigError

KEY = "_extra_state"
"""Last part of its key in a `state_dict()`."""

STATE, SHARED = "extra_state/", "shared_extra_state"
"""Names of the opaque items: one a module, by its key; and the further keys of those that are in several places."""

_GET, _SET = torch.nn.Module.get_extra_state, torch.nn.Module.set_extra_state


class ExtraStates:
    """The modules of all models that have extra state, each under the first of its keys.

    Attributes:
        modules: by key.
        shared: further key -> the first one.
    """

    def __init__(self) -> None:
        self.modules: dict[str, torch.nn.Module] = {}
        self.shared: dict[str, str] = {}
        self._keys: dict[int, str] = {}  # by `id` of the module

    def look(self, prefix: str, modules: Mapping[str, torch.nn.Module]) -> None:
        """Note those among a model's modules.

        Raises:
            ConfigError: a module gives its state and takes none, so torch could not load it either; or two have one name.
        """
        found = {
            path: module for path, module in modules.items() if type(module).get_extra_state is not _GET
        }  # of the class, as torch asks
        keys = {f"{path}.{KEY}" if path else KEY: path for path in found}
        for raw, path in keys.items():
            module = found[path]
            kind = type(module)
            if kind.set_extra_state is _SET:
                raise ConfigError(
                    f"module {prefix}{path} (a {kind.__name__}) has get_extra_state() and no set_extra_state(), so what it keeps could "
                    "not be put back; define both"
                )
            plain = plain_name(raw)
            self._note(prefix, (raw,) if plain != raw and plain in keys else (plain, raw), module)

    def _note(self, prefix: str, names: tuple[str, ...], module: torch.nn.Module) -> None:
        """Names are plain; where another module has the plain one, `module.` was no wrapper, and it keeps the raw one."""
        for name in names:
            key = prefix + name
            if self.modules.get(self.shared.get(key, key), module) is module:
                break
        else:
            raise ConfigError(f"two different modules are called {key.removesuffix(KEY)}; rename a module or a model")
        first = self._keys.setdefault(id(module), key)
        if first == key:
            self.modules[key] = module
        else:
            self.shared[key] = first

    def items(self) -> list[tuple[str, bytes]]:
        """Their states as they are now, as opaque items.

        Raises:
            UnsupportedTensor: one cannot be stored without loss; names where it sits.
        """
        found = [(STATE + key, opaque.encode(key, module.get_extra_state())) for key, module in self.modules.items()]
        return [*found, (SHARED, opaque.encode(SHARED, self.shared))] if self.shared else found

    def put_back(self, decoded: Mapping[str, Any]) -> None:
        """Give each module its state of a cut."""
        for key, module in self.modules.items():
            module.set_extra_state(decoded[STATE + key])

    def problems(self, decoded: Mapping[str, Any]) -> list[str]:
        """How they differ from those of a cut."""
        saved = {name.removeprefix(STATE) for name in decoded if name.startswith(STATE)}
        saved_shared: Mapping[str, str] = decoded.get(SHARED, {})
        here, there = {*self.modules, *self.shared}, {*saved, *saved_shared}
        parted = [key for key in here & there if self.shared.get(key, key) != saved_shared.get(key, key)]
        return [
            *(f"missing in the script: {key}" for key in sorted(there - here)),
            *(f"not in the cut: {key}" for key in sorted(here - there)),
            *(
                f"{key}: of the same module as {self.shared.get(key, key)} in the script, as {saved_shared.get(key, key)} in the cut"
                for key in sorted(parted)
            ),
        ]


def by_key(items: Mapping[str, bytes]) -> dict[str, Any]:
    """The states of a cut under all their keys, from its opaque items."""
    found = {name.removeprefix(STATE): opaque.decode(content) for name, content in items.items() if name.startswith(STATE)}
    shared = opaque.decode(items[SHARED]) if SHARED in items else {}
    return found | {further: found[first] for further, first in shared.items()}

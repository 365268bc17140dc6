"""Per-iteration, redundancy-aware checkpoints for PyTorch training. `Store.open(uri)` is the way in.

Names are imported when first used, so that the tools that only read bytes work without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adacheck.checkpointer import Checkpointer as Checkpointer
    from adacheck.status import Status as Status
    from adacheck.store import Store as Store

    __version__: str

__all__ = ["Checkpointer", "Status", "Store", "__version__"]
_HOMES = {"Store": "adacheck.store", "Checkpointer": "adacheck.checkpointer", "Status": "adacheck.status"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("adacheck")
    if name == "errors":
        return import_module("adacheck.errors")
    raise AttributeError(f"module 'adacheck' has no attribute {name!r}")

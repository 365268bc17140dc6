"""Per-iteration, redundancy-aware checkpoints for PyTorch training. `Store.open(uri)` is the way in.

Names are imported when first used, so that the tools that only read bytes work without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adacheck.checkpointer import Checkpointer as Checkpointer
    from adacheck.store import Store as Store

__all__ = ["Checkpointer", "Store"]
_HOMES = {"Store": "adacheck.store", "Checkpointer": "adacheck.checkpointer"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "errors":
        return import_module("adacheck.errors")
    raise AttributeError(f"module 'adacheck' has no attribute {name!r}")

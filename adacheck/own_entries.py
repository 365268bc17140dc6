"""What an optimizer keeps besides entries for each parameter: under keys of its own in `state`, or beside it in its `state_dict()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

_OF_TORCH = ("state", "param_groups")


def own_entries(optimizer: Optimizer) -> dict[str, dict[Any, Any]]:
    """Entries of `optimizer.state` whose key is no tensor, and those of its `state_dict()` that are not torch's; empty for most."""
    keyed = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    beside: dict[Any, Any] = {}
    if type(optimizer).state_dict is not Optimizer.state_dict or optimizer._optimizer_state_dict_post_hooks:
        beside = {key: value for key, value in optimizer.state_dict().items() if key not in _OF_TORCH}
    return {"state": keyed, "beside": beside} if keyed or beside else {}


def put_own_entries(optimizer: Optimizer, saved: Mapping[str, Mapping[Any, Any]]) -> None:
    """Put back what `own_entries` gave, before the parameters' entries are written: `load_state_dict` may replace or cast those."""
    if saved.get("beside"):
        optimizer.load_state_dict({**optimizer.state_dict(), **saved["beside"]})
    for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(saved.get("state", {}))

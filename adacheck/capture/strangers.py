"""Optimizers that step attached parameters without being attached: rebuilt in mid-run, forgotten, or kept inside another object.

What they do to a parameter goes whole. What they know (moments, step counts, learning rates) is in no cut, so it is said: once while
training, and again by the restore of such a cut.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from adacheck.capture.inventory import Inventory
from adacheck.capture.step_hooks import untraced
from adacheck.optimizers import class_name

_log = logging.getLogger("adacheck")


class Strangers:
    """Watches every optimizer step of the process, from `install` to `remove`.

    Attributes:
        stepped: states that one has stepped since the last `collect`.
        unattached: fqn -> class of the optimizer, for every parameter that one has stepped so far.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._attached = {id(optimizer) for optimizer in inventory.optimizers.values()}
        self._handle: Any = None
        self._pid = os.getpid()
        self.stepped: set[int] = set()
        self.unattached: dict[str, str] = {}

    def install(self) -> None:
        """Begin to watch."""
        self._handle = register_optimizer_step_post_hook(untraced(self._after_step))

    def remove(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()

    def collect(self) -> set[int]:
        """The states stepped since the last call."""
        stepped, self.stepped = self.stepped, set()
        return stepped

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(optimizer) in self._attached or os.getpid() != self._pid:
            return
        mine = [live for group in optimizer.param_groups for p in group["params"] if (live := self._inventory.by_parameter.get(id(p)))]
        self.stepped.update(live.state for live in mine)
        if not mine or any(known.state is optimizer.state for known in self._inventory.optimizers.values()):
            return  # none of ours, or a part of an attached one, which keeps its entries
        kind = class_name(type(optimizer))
        if not self.unattached:
            _log.warning(
                "%s is stepped by an optimizer that was not given to store.attach (%s): its values are kept, the state and learning rate "
                "of that optimizer are not; give every optimizer to store.attach, also one that is made in mid-run",
                mine[0].fqn,
                kind,
            )
        self.unattached.update({live.fqn: kind for live in mine})

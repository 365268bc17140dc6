"""Optimizers that did not fire in an iteration: their states changed only if somebody stepped them where no hook saw it.

A fused step moves nothing the watch can see, so "did not fire" alone proves nothing. The bytes do: a digest of parameters and step
tensors that equals the one of the step before is a no-op, anything else goes whole.
"""

from __future__ import annotations

import blake3

from adacheck.capture.inventory import Inventory, LiveState
from adacheck.states import tensor_bytes

RECENT_STEPS = 32


class QuietOptimizers:
    """Keeps digests only for optimizers that were quiet more than once lately; a rare skipped step is sent whole instead."""

    def __init__(self) -> None:
        self._calls = 0
        self._quiet_at: dict[str, list[int]] = {}
        self._digests: dict[int, bytes] = {}

    def reasons(self, inventory: Inventory, fired: set[str]) -> dict[int, str]:
        """The states of quiet optimizers that are not known to be unchanged since the last call, with the reason."""
        self._calls += 1
        reasons: dict[int, str] = {}
        for name in ("", *inventory.optimizers):  # the first: parameters of no attached optimizer, which another one may step
            quiet = name not in fired
            recent = [at for at in self._quiet_at.get(name, []) if at > self._calls - RECENT_STEPS] + [self._calls] * quiet
            self._quiet_at[name] = recent
            for live in inventory.states.values():
                if live.optimizer_name == name and live.kind == "parameter" and (name or live.parameter.requires_grad):
                    before = self._digests.pop(live.state, None)
                    now = _digest(live) if len(recent) > 1 or (quiet and before) else None
                    if now is not None:
                        self._digests[live.state] = now
                    if quiet and (now is None or now != before):
                        reasons[live.state] = "quiet"
        return reasons


def _digest(live: LiveState) -> bytes:
    hasher = blake3.blake3()
    for name, tensor in live.tensors().items():
        if name in ("param", "step"):
            hasher.update(tensor_bytes(tensor.cpu().contiguous()))
    return hasher.digest()

"""States that nobody was seen to step: they changed only if somebody stepped them where no hook saw it.

A fused step moves nothing the watch can see, so "did not fire" alone proves nothing. The bytes do: a digest of parameters and step
tensors that equals the one of the step before is a no-op, anything else goes whole. Frozen parameters are too many to read at every
step, and who writes them behind our back (an average of the weights kept through `.data`) writes all of them: a sample is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import blake3
import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from adacheck.capture.inventory import Inventory, LiveState
from adacheck.states import local_tensor, tensor_bytes

RECENT_STEPS = 32
SMALL_BYTES = 64 << 10
"""Buffers under this size are sent (and left out again if unchanged) at every step: their kernels often write unseen."""

SAMPLES = 16
"""Elements of a frozen parameter or a large buffer that are looked at in every step, spread over all of it."""


class QuietOptimizers:
    """Keeps digests only for optimizers that were quiet more than once lately; a rare skipped step is sent whole instead."""

    def __init__(self) -> None:
        self._calls = 0
        self._quiet_at: dict[str, list[int]] = {}
        self._digests: dict[int, bytes] = {}
        self._samples: dict[int, _Sample] = {}

    def begin(self, inventory: Inventory) -> None:
        """The chain holds the states as they are now: already the first call of `reasons` has something to compare with."""
        self._digests.clear()
        self._samples = {n: _Sample(live.current()) for n, live in inventory.states.items() if not (_stepped(live) or _unwatched(live))}

    def reasons(self, inventory: Inventory, fired: set[str], derived: Collection[int] = ()) -> dict[int, str]:
        """The states nobody stepped that are not known to be unchanged since the last call, with the reason.

        `unseen` are those whose bytes did change; for `quiet` and `buffer` there was nothing to compare with. `derived` states are
        accounted for already, and are not read.
        """
        self._calls += 1
        reasons: dict[int, str] = {}
        for name in ("", *inventory.optimizers):  # the first: parameters of no attached optimizer, which another one may step
            quiet = name not in fired
            recent = [at for at in self._quiet_at.get(name, []) if at > self._calls - RECENT_STEPS] + [self._calls] * quiet
            self._quiet_at[name] = recent
            for live in inventory.by_optimizer[name]:
                if live.state in derived:
                    self._digests.pop(live.state, None)
                elif _stepped(live):
                    before = self._digests.pop(live.state, None)
                    now = _digest(live) if len(recent) > 1 or (quiet and before) else None
                    if now is not None:
                        self._digests[live.state] = now
                    if quiet and (now is None or now != before):
                        reasons[live.state] = "unseen" if now and before else "quiet"
                elif _unwatched(live):
                    reasons[live.state] = "buffer"
                elif self._differs(live):
                    reasons[live.state] = "unseen"
        return reasons

    def _differs(self, live: LiveState) -> bool:
        """Whether a sample of it is other than at the last call; memory that is new to it counts as equal, since the watch saw that.

        So does a state without a sample: it is new since `begin`, or was frozen in this step, and goes whole for that.
        """
        tensor = live.current()
        known = self._samples.get(live.state)
        if known is None or known.address != tensor.data_ptr():
            self._samples[live.state] = _Sample(tensor)
            return False
        return known.changed()


class _Sample:
    """Some elements of a tensor, looked at again and again where they lie."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = tensor.data_ptr()
        local = local_tensor(tensor, "a tensor that nobody steps")
        self._memory, self._places = np.empty(0, np.uint8), np.empty(0, np.intp)
        if local.device.type == "cpu":
            self._memory, self._places = _memory(local), _places(local, range(0, local.numel(), max(1, local.numel() // SAMPLES))[:SAMPLES])
        self._content = self._look()

    def _look(self) -> bytes:
        return self._memory[self._places].tobytes()

    def changed(self) -> bool:
        """Whether the elements differ from those at the last look."""
        before, self._content = self._content, self._look()
        return before != self._content


def _memory(tensor: torch.Tensor) -> np.ndarray:
    """All the memory that a CPU tensor lies in, as elements of its size."""
    size = tensor.element_size()
    content = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).numpy()
    return content[: len(content) // size * size].view(f"V{size}")


def _places(tensor: torch.Tensor, numbers: Sequence[int]) -> np.ndarray:
    """Where in `_memory` elements lie that are numbered in row-major order, whatever the strides."""
    at = np.full(len(numbers), tensor.storage_offset(), np.intp)
    indices = np.unravel_index(np.asarray(numbers, np.intp), tensor.shape) if tensor.dim() else ()
    for index, stride in zip(indices, tensor.stride(), strict=True):
        at += index * stride
    return at


def _stepped(live: LiveState) -> bool:
    """Whether an optimizer may step it, attached or not."""
    return live.kind == "parameter" and (live.optimizer is not None or live.parameter.requires_grad)


def _unwatched(live: LiveState) -> bool:
    """Whether the watch may miss writes to this buffer: batch norm's kernel writes running statistics of any size unseen."""
    if live.kind == "parameter":
        return False
    tensor = live.current()
    by_kernel = live.owner is not None and isinstance(live.owner[0], _NormBase)
    return by_kernel or tensor.numel() * tensor.element_size() < SMALL_BYTES


def _digest(live: LiveState) -> bytes:
    """Of the parameter and the step counter, which every step moves; of all tensors where the optimizer keeps no counter."""
    tensors = live.tensors()
    hasher = blake3.blake3()
    for name in ("param", "step") if "step" in tensors else tensors:
        hasher.update(tensor_bytes(tensors[name].cpu().contiguous()))
    return hasher.digest()

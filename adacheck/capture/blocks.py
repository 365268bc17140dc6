"""The pool of blocks through which everything leaves the trainer: raw copies of tensor ranges, at most 4 MiB each.

The trainer copies a range once and goes on; a block is taken again only after the keeper has given it back, so later writes to
the live tensors never reach what was captured.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch

from adacheck.manifests.record import SEGMENT_BYTES_MAX

ALIGNMENT_BYTES = 64


@dataclass(eq=False)
class Block:
    """One buffer of the pool: `data` is uint8 of `SEGMENT_BYTES_MAX` elements. `pieces` counts what the keeper still needs."""

    data: torch.Tensor
    pieces: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one captured range lies."""

    block: Block
    start: int
    size_bytes: int

    def tensor(self) -> torch.Tensor:
        """The place as a uint8 tensor."""
        return self.block.data[self.start : self.start + self.size_bytes]

    def view(self) -> memoryview:
        """The captured bytes, writable."""
        return self.tensor().numpy().data


class PoolEmpty(Exception):
    """No block came back within the deadline; the checkpointer then detaches the keeper instead of stopping the training."""


@dataclass
class Blocks:
    """The pool. One thread (the trainer's) takes; any thread gives back.

    Attributes:
        count: blocks in the pool.
        deadline_s: longest wait for one block.
        blocked_s: seconds waited so far, in all.
    """

    count: int
    deadline_s: float
    blocked_s: float = 0.0
    _free: list[Block] = field(default_factory=list)
    _made: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)  # taken by itself, as in `Shared`
    _changed: threading.Condition = field(init=False)
    _open: Block | None = None
    _filled: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._lock)

    def reserve(self, size: int) -> Slice:
        """Room for `size` bytes, at most `SEGMENT_BYTES_MAX`, to be written by the caller; small ones share a block.

        Raises:
            PoolEmpty: no block came back in time.
        """
        if size > SEGMENT_BYTES_MAX // 2:  # has a block of its own, so that the small ones' block is not ended half empty
            block = self._take()
            block.pieces = 1
            return Slice(block, 0, size)
        if self._open is None or self._filled + size > SEGMENT_BYTES_MAX:
            self.seal()
            self._open, self._filled = self._take(), 0
            self._open.pieces = 1  # held open by the writer, besides its pieces
        piece = Slice(self._open, self._filled, size)
        with self._lock:
            self._open.pieces += 1
        self._filled += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return piece

    def seal(self) -> None:
        """End the block that small pieces are gathered in, so that it can come back as soon as its pieces are done."""
        if self._open is not None:
            block, self._open = self._open, None
            self._release(block)

    def give(self, piece: Slice) -> None:
        """The keeper needs this piece no more."""
        self._release(piece.block)

    def _release(self, block: Block) -> None:
        with self._lock:
            block.pieces -= 1
            assert block.pieces >= 0, "a block was given back twice"
            if block.pieces == 0:
                self._free.append(block)
                self._changed.notify()

    def _take(self) -> Block:
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made < self.count:
                self._made += 1
                with torch.inference_mode(False):  # whatever the trainer is in: others write it later
                    return Block(torch.empty(SEGMENT_BYTES_MAX, dtype=torch.uint8, device="cpu"))
            started = time.monotonic()
            self._changed.wait_for(lambda: bool(self._free), timeout=self.deadline_s)
            self.blocked_s += time.monotonic() - started
            if not self._free:
                raise PoolEmpty(f"no block of {self.count} came back from the keeper within {self.deadline_s:.0f} s")
            return self._free.pop()

"""Cuts tensors into pieces, has each copied into a block, and submits it as soon as it is copied."""

from __future__ import annotations

from collections.abc import Callable

import torch

from adacheck.capture.blocks import Blocks
from adacheck.capture.copier import Copier
from adacheck.keeper.submission import Piece
from adacheck.manifests.record import SEGMENT_BYTES_MAX
from adacheck.states import dtype_name, flat_bytes, local_tensor


class PieceWriter:
    """Writes pieces into `blocks` and passes each to `submit`."""

    def __init__(self, blocks: Blocks, submit: Callable[[Piece], None]) -> None:
        self._blocks, self._submit = blocks, submit
        self._copier = Copier(submit)

    def send_value(self, state: int, name: str, tensor: torch.Tensor) -> None:
        """Send a whole tensor in canonical segments; a non-contiguous one in row-major order."""
        local = local_tensor(tensor, name)
        self._send("value", state, 0, name, local.contiguous(), 0, local.numel(), None)

    def send_gradient(self, state: int, event: int, gradient: torch.Tensor, coefficient: float | None, *, while_stepping: bool) -> None:
        """Send a gradient; `while_stepping` copies it in the background until `wait`, and nothing may write it before."""
        local = local_tensor(gradient, "grad")
        while_stepping = while_stepping and local.is_contiguous()
        self._send("gradient", state, event, "grad", local.contiguous(), 0, local.numel(), coefficient, while_stepping)

    def wait(self) -> None:
        """Until all that was sent is copied."""
        self._copier.wait()

    def close(self) -> None:
        """End the background copying."""
        self._copier.stop()

    def send_refresh(self, state: int, name: str, tensor: torch.Tensor, start: int, stop: int) -> None:
        """Send the elements `[start, stop)` of a flattened tensor, to be compared."""
        self._send("refresh", state, 0, name, local_tensor(tensor, name).contiguous(), start, stop, None)

    def send_opaque(self, name: str, content: bytes) -> None:
        """Send an opaque item."""
        source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._send("opaque", 0, 0, name, source, 0, len(content), None)

    def seal(self) -> None:
        """Nothing more of this step will come."""
        self._blocks.seal()

    def _send(
        self,
        role: str,
        state: int,
        event: int,
        name: str,
        tensor: torch.Tensor,
        start: int,
        stop: int,
        coefficient: float | None,
        while_stepping: bool = False,
    ) -> None:
        if start == stop:
            return
        dtype, itemsize = dtype_name(tensor.dtype), tensor.element_size()
        flat, step = flat_bytes(tensor), SEGMENT_BYTES_MAX // itemsize
        for at in range(start, stop, step):
            end = min(at + step, stop)
            source = flat[at * itemsize : end * itemsize]
            piece = Piece(role, state, event, name, dtype, at, end, coefficient, self._blocks.reserve(source.numel()))
            if while_stepping:
                self._copier.copy(source, piece)
            else:
                piece.where.tensor().copy_(source)
                self._submit(piece)

"""Copies tensors into blocks, range by range, and submits each piece as soon as it is copied."""

from __future__ import annotations

from collections.abc import Callable

import torch

from adacheck.capture.blocks import Blocks
from adacheck.keeper.submission import Piece
from adacheck.manifests.record import SEGMENT_BYTES_MAX
from adacheck.states import dtype_name, local_tensor


class PieceWriter:
    """Writes pieces into `blocks` and passes each to `submit`."""

    def __init__(self, blocks: Blocks, submit: Callable[[Piece], None]) -> None:
        self._blocks, self._submit = blocks, submit
        self.sent_bytes = 0

    def send(self, role: str, state: int, event: int, name: str, tensor: torch.Tensor, coefficient: float | None) -> None:
        """Send a whole tensor in canonical segments; a non-contiguous one in row-major order."""
        local = local_tensor(tensor, name)
        if local.numel():
            self._send(role, state, event, name, local.contiguous(), 0, local.numel(), coefficient)

    def send_range(self, role: str, state: int, event: int, name: str, tensor: torch.Tensor, start: int, stop: int) -> None:
        """Send the elements `[start, stop)` of a flattened tensor, in as few pieces as fit."""
        self._send(role, state, event, name, local_tensor(tensor, name).contiguous(), start, stop, None)

    def send_bytes(self, role: str, name: str, content: bytes) -> None:
        """Send plain bytes, such as an opaque item."""
        source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._send(role, 0, 0, name, source, 0, len(content), None)

    def seal(self) -> None:
        """Nothing more of this step will come."""
        self._blocks.seal()

    def _send(
        self, role: str, state: int, event: int, name: str, tensor: torch.Tensor, start: int, stop: int, coefficient: float | None
    ) -> None:
        dtype, itemsize = dtype_name(tensor.dtype), tensor.element_size()
        flat = _flat_bytes(tensor)
        step = SEGMENT_BYTES_MAX // itemsize
        for at in range(start, stop, step):
            end = min(at + step, stop)
            where = self._blocks.write(flat[at * itemsize : end * itemsize])
            self.sent_bytes += where.size_bytes
            self._submit(Piece(role, state, event, name, dtype, at, end, coefficient, where))


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.reshape(-1).view(torch.uint8)

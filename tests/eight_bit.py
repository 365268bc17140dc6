"""An Adam whose moments are bytes, block by block with a scale, as 8-bit optimizers of other packages keep them; and its declaration."""

from __future__ import annotations

from typing import Any

import torch

from adacheck.optimizers import Declaration

BLOCK = 64


class Adam8bit(torch.optim.Optimizer):
    """Keeps codes, scales, a code book that all parameters share, and a step count that is a plain number."""

    def __init__(self, parameters: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})
        self.book = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step: unpack the moments, move them and the parameter, pack them again."""
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                entries = self.state[parameter]
                if not entries:
                    blocks = -(-parameter.numel() // BLOCK)
                    entries.update({"step": 0, "book": self.book})
                    for name in ("first", "second"):
                        entries[name] = torch.full((blocks, BLOCK), 128, dtype=torch.uint8)
                        entries[f"{name}_scale"] = torch.zeros(blocks, 1)
                entries["step"] += 1
                moments = [self._moved(entries, *named, parameter.grad, beta) for named, beta in zip(_POWERS, group["betas"], strict=True)]
                first, second = (moment.flatten()[: parameter.numel()].view_as(parameter) for moment in moments)
                parameter.sub_(first / (second.abs().sqrt() + 1e-8), alpha=group["lr"])

    def _moved(self, entries: dict[str, Any], name: str, power: int, gradient: torch.Tensor, beta: float) -> torch.Tensor:
        codes, scale = entries[name], entries[f"{name}_scale"]
        given = torch.zeros(codes.shape).flatten()
        given[: gradient.numel()] = gradient.flatten() ** power
        moment: torch.Tensor = (entries["book"][codes.long()] * scale).lerp(given.view_as(codes), 1 - beta)
        scale.copy_(moment.abs().amax(1, keepdim=True).clamp(min=1e-12))
        entries[name] = torch.bucketize(moment / scale, entries["book"]).clamp(max=255).to(torch.uint8)
        return moment


_POWERS = (("first", 1), ("second", 2))
DECLARED = Declaration(
    kind=Adam8bit,
    entries=("step", "book", "first", "first_scale", "second", "second_scale"),
    writes_gradients=False,
    version="1",
    make=lambda: Adam8bit([torch.zeros(1)]),
)

"""Learns the coefficient k of `clip_grad_norm_`, so that clipped bf16 gradients can still travel as bf16 (see `keeper/narrow.py`).

The wrapper changes nothing: it calls torch's own function and computes k from the same two numbers, by the same operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

_PLACES = ((clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_"))


class ClipCoefficients:
    """Remembers, from `install` to `remove`, the last coefficient each parameter's gradient was multiplied with."""

    def __init__(self) -> None:
        self._by_parameter: dict[int, torch.Tensor] = {}
        self._original: Any = None
        self._wrapper: Any = None

    def install(self) -> None:
        """Wrap the function that `clip_grad_norm_` calls, whoever imported that under whatever name."""
        original = self._original = getattr(*_PLACES[0], None)
        if original is None:
            return  # a torch that works otherwise: gradients travel unnarrowed

        def clip_and_remember(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> None:
            clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            original(clipped, max_norm, total_norm, *args, **kwargs)
            self._remember(clipped, max_norm, total_norm)

        self._wrapper = clip_and_remember
        for module, name in _PLACES:
            if getattr(module, name, None) is original:
                setattr(module, name, clip_and_remember)

    def remove(self) -> None:
        """Put torch's function back, unless somebody has wrapped ours since."""
        for module, name in _PLACES:
            if self._wrapper is not None and getattr(module, name, None) is self._wrapper:
                setattr(module, name, self._original)

    def of(self, parameter: torch.Tensor) -> float | None:
        """k of this parameter's gradient, `None` if it was not clipped since the last `clear`."""
        coefficient = self._by_parameter.get(id(parameter))
        return None if coefficient is None else float(coefficient)

    def clear(self) -> None:
        """Forget all: the gradients of the next iteration are other ones."""
        self._by_parameter.clear()

    def _remember(self, parameters: Iterable[torch.Tensor], max_norm: Any, total_norm: Any) -> None:
        with torch.no_grad():
            coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
        if isinstance(coefficient, torch.Tensor) and coefficient.numel() == 1:
            for parameter in parameters:
                self._by_parameter[id(parameter)] = coefficient

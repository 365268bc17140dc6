"""Gradients that `ckpt.step()` finds on the parameters: those that the next optimizer step will still use belong to the cut.

In mid-accumulation that is their sum so far. A gradient that `zero_grad(set_to_none=False)` keeps is zero then, which is not the same as
none. One that was stepped is spent, and most scripts drop it before the next backward pass: it is not kept. The mark that tells these
apart is an attribute of the gradient itself, so it goes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from adacheck.capture.inventory import LiveState
from adacheck.capture.watch import version

_MARK = "_adacheck_spent"
_SPARSE = "sparse_coo"


def spend(states: Iterable[LiveState]) -> None:
    """Note that an optimizer has just used the gradients of these states."""
    for live in states:
        gradient = live.parameter.grad
        if gradient is not None:
            outlived = _MARK in vars(gradient)
            setattr(gradient, _MARK, (version(gradient), outlived))


def unspent(states: Iterable[LiveState]) -> dict[str, Any]:
    """What of the present gradients a restore must put back, by name of the parameter: `None` stands for zeros."""
    found: dict[str, Any] = {}
    for live in states:
        gradient = live.parameter.grad
        if gradient is None:
            continue
        at, outlived = vars(gradient).get(_MARK, (None, False))
        if at == version(gradient):
            if outlived:
                found[live.fqn] = None  # whoever kept it zeroes it before it is used
        else:
            found[live.fqn] = _content(gradient)
    return found


def waiting(states: Iterable[LiveState]) -> bool:
    """Whether a gradient is there that no optimizer has used yet."""
    gradients = [live.parameter.grad for live in states]
    return any(gradient is not None and vars(gradient).get(_MARK, (None,))[0] != version(gradient) for gradient in gradients)


def put_back(states: Iterable[LiveState], gradients: Mapping[str, Any]) -> None:
    """Give every parameter the gradient that `unspent` said, or none."""
    for live in states:
        parameter = live.parameter
        if live.fqn not in gradients:
            parameter.grad = None
            continue
        content = gradients[live.fqn]
        if isinstance(content, tuple):
            _, indices, values, shape, coalesced = content
            made = torch.sparse_coo_tensor(indices, values, shape, device=parameter.device, is_coalesced=coalesced, check_invariants=True)
            parameter.grad = made
            continue
        dtype = parameter.dtype if content is None else content.dtype
        gradient = torch.zeros_like(parameter.detach(), dtype=dtype)
        if content is None:
            setattr(gradient, _MARK, (version(gradient), True))
        else:
            gradient.copy_(content)
        parameter.grad = gradient


def _content(gradient: torch.Tensor) -> Any:
    gradient = gradient.detach()
    if gradient.layout == torch.sparse_coo:
        return (_SPARSE, gradient._indices(), gradient._values(), list(gradient.shape), gradient.is_coalesced())
    if gradient.is_contiguous() and not gradient.reshape(-1).view(torch.uint8).any():
        return None
    return gradient

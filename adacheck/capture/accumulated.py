"""Gradients that `ckpt.step()` finds on the parameters: those that the next optimizer step will still use belong to the cut.

In mid-accumulation that is their sum so far. One that an optimizer has used is spent, and most scripts drop it before the next backward
pass: it is not kept. Where it is kept, by `zero_grad(set_to_none=False)`, it comes back as zeros, which is not the same as none; and where
nothing zeroes it, so that the next one is added to it, it comes back as it is. What a script does shows in its first three iterations, and
as long as it writes to a gradient as often from one use to the next, it still does it; that it did otherwise is said, once.
The mark that tells all this apart is an attribute of the gradient itself, so it goes with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from adacheck.capture.inventory import LiveState
from adacheck.capture.watch import version

_MARK = "_adacheck_spent"
_log = logging.getLogger("adacheck")
_said = False


class _Mark(NamedTuple):
    """Put on a gradient when an optimizer has used it.

    Attributes:
        version: its version counter then.
        outlived: it had a mark already, so whoever drops gradients did not drop this one.
        zeroed: whether it is zeroed before the next backward pass; `None` as long as that was not seen.
        writes: how often it was written to from the use before to this one; 0 if that is not known.
    """

    version: int
    outlived: bool
    zeroed: bool | None = None
    writes: int = 0


def spend(states: Iterable[LiveState]) -> None:
    """Note that an optimizer has just used the gradients of these states."""
    for live in states:
        gradient = live.parameter.grad
        if gradient is None:
            continue
        before: _Mark | None = vars(gradient).get(_MARK)
        if before is None:
            setattr(gradient, _MARK, _Mark(version(gradient), outlived=False))
        else:
            writes = version(gradient) - before.version
            steady = before.outlived and before.writes in (0, writes)
            setattr(gradient, _MARK, _Mark(version(gradient), True, before.zeroed if steady else None, writes))
            if not steady and live.parameter.requires_grad:
                _look_before_the_next_backward(live)
            if before.zeroed and writes < before.writes:
                _say_once(f"the gradient of {live.fqn} was zeroed before each backward pass, and may not have been before the last one")


def unspent(states: Iterable[LiveState]) -> dict[str, Any]:
    """What of the present gradients a restore must put back, by name of the parameter, for `put_back`."""
    found: dict[str, Any] = {}
    for live in states:
        gradient = live.parameter.grad
        if gradient is None:
            continue
        mark: _Mark | None = vars(gradient).get(_MARK)
        if mark is None or mark.version != version(gradient):
            found[live.fqn] = {"spent": False, "gradient": _content(gradient)}
        elif mark.outlived:
            kept = torch.zeros_like(gradient) if mark.zeroed else gradient
            dense_zeros = mark.zeroed and gradient.layout == torch.strided
            found[live.fqn] = {"spent": True, "gradient": None if dense_zeros else _content(kept)}
    return found


def waiting(states: Iterable[LiveState]) -> bool:
    """Whether a gradient is there that no optimizer has used yet."""
    for live in states:
        gradient = live.parameter.grad
        if gradient is not None:
            mark: _Mark | None = vars(gradient).get(_MARK)
            if mark is None or mark.version != version(gradient):
                return True
    return False


def put_back(states: Iterable[LiveState], gradients: Mapping[str, Any]) -> None:
    """Give every parameter the gradient that `unspent` told of, or none."""
    for live in states:
        saved = gradients.get(live.fqn)
        live.parameter.grad = None if saved is None else _made(live.parameter.detach(), saved["gradient"])
        if saved is not None and saved["spent"]:
            gradient = live.parameter.grad
            assert gradient is not None, "it was just made"
            setattr(gradient, _MARK, _Mark(version(gradient), outlived=True, zeroed=saved["gradient"] is None or None))
            if saved["gradient"] is not None and live.parameter.requires_grad:
                _look_before_the_next_backward(live)


def _look_before_the_next_backward(live: LiveState) -> None:
    """Learn, when its next gradient arrives, whether somebody zeroed the spent one."""
    parameter, fqn = live.parameter, live.fqn

    def look(_: torch.Tensor) -> None:
        handle.remove()
        gradient = parameter.grad
        mark: _Mark | None = None if gradient is None else vars(gradient).get(_MARK)
        if gradient is not None and mark is not None:
            zeroed = version(gradient) != mark.version
            setattr(gradient, _MARK, mark._replace(zeroed=zeroed))
            if not zeroed:
                _say_once(f"the gradient of {fqn} is not zeroed before the backward pass, which adds to it")

    handle = parameter.register_hook(look)  # type: ignore[no-untyped-call]


def _say_once(what: str) -> None:
    global _said
    if not _said:
        _said = True
        _log.warning(
            "%s: cuts of the steps before lack it, later ones have it; zero_grad() belongs into every iteration that begins a new sum", what
        )


def _content(gradient: torch.Tensor) -> Any:
    """A gradient as an opaque value: `None` for zeros, a tuple for a sparse one."""
    gradient = gradient.detach()
    if gradient.layout == torch.sparse_coo:
        return (gradient._indices(), gradient._values(), list(gradient.shape), gradient.is_coalesced())
    if gradient.is_contiguous() and not gradient.reshape(-1).view(torch.uint8).any():
        return None
    return gradient


def _made(parameter: torch.Tensor, content: Any) -> torch.Tensor:
    if isinstance(content, tuple):
        indices, values, shape, coalesced = content
        return torch.sparse_coo_tensor(indices, values, shape, device=parameter.device, is_coalesced=coalesced, check_invariants=True)
    if content is None:
        return torch.zeros_like(parameter)
    return torch.empty_like(parameter, dtype=content.dtype).copy_(content)

"""Writes the bytes of one state into the live tensors, whatever their strides, and makes the optimizer's entries as torch would have.

Live tensors keep their identity, device and strides; only a buffer that cannot hold the bytes is bound anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from adacheck.capture import opaque
from adacheck.capture.inventory import LiveState
from adacheck.same import same_bytes
from adacheck.states import State, flat_bytes, local_tensor


def put_state(live: LiveState, state: State) -> None:
    """Make a live state the one given, which has the same names and dtypes, and the same shape unless it is a buffer."""
    parameter, source = live.current(), state.tensors["param"]
    if live.owner is not None and not can_hold(parameter, source):
        setattr(*live.owner, source.to(parameter.device).clone())
    else:
        write_bytes(local_tensor(parameter, live.fqn), source)
    if live.kind == "parameter":
        parameter.requires_grad_(state.spec.requires_grad)
    if live.optimizer is not None:
        _put_entries(live, live.optimizer, state)


def can_hold(live: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a live tensor has a place for every element: one that was expanded has one for many, which must then be equal."""
    if live.shape != source.shape:
        return False
    return same_bytes(_distinct(source, live).expand(source.shape), source) if _distinct(live, live) is not live else True


def _distinct(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` for which `like`, of the same shape, has memory of its own."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _put_entries(live: LiveState, optimizer: torch.optim.Optimizer, state: State) -> None:
    parameter = live.parameter
    names = [tensor.name for tensor in state.spec.tensors if tensor.name != "param"]
    scalars = opaque.decode(state.spec.scalars) if state.spec.scalars else {}  # the trainer's own: the shadow keeps `state.scalars`
    if not names and not scalars:
        optimizer.state.pop(parameter, None)
        return
    before = optimizer.state[parameter]
    entries: dict[str, Any] = scalars
    for name in names:
        source, known = state.tensors[name], before.get(name)
        if isinstance(known, torch.Tensor) and known.shape == source.shape and known.dtype == source.dtype:
            entries[name] = known
        else:
            entries[name] = _like(parameter, source)
        write_bytes(local_tensor(entries[name], name), source)
    optimizer.state[parameter] = {name: entries[name] for name in _in_order(before, entries)}


def _in_order(before: Mapping[str, Any], entries: Mapping[str, Any]) -> list[str]:
    fresh = sorted((name for name in entries if name not in before), key=lambda name: (name != "step", name))  # torch's own order
    return [name for name in before if name in entries] + fresh


def _like(parameter: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A fresh optimizer tensor where the optimizer itself would have put it: with its parameter, or on the CPU if it is a counter."""
    if source.dim() == 0 and parameter.dim() != 0:
        return torch.empty_like(source)
    if source.shape == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=source.dtype)
    return torch.empty_like(source, device=parameter.device)


def write_bytes(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another of the same dtype and shape, on any device and of any strides, bit for bit."""
    if destination.numel() == 0:
        return
    as_it_is = not (destination.is_conj() or destination.is_neg())
    if destination.is_contiguous() and destination.device.type == "cpu" and as_it_is:
        flat_bytes(destination).copy_(flat_bytes(source))
    else:
        _distinct(destination, destination).copy_(_distinct(source, destination))

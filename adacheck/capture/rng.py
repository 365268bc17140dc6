"""The random number generators of a process as one opaque item: always part of a cut, and installed whole or not at all."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from adacheck.errors import StateMismatch


def rng_state() -> dict[str, Any]:
    """States of Python's, NumPy's global, torch's CPU generator, and of each CUDA device's if CUDA is in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {"python": random.getstate(), "numpy": numpy.random.get_state(legacy=False), "torch": torch.get_rng_state(), "cuda": cuda}


def install_rng(state: dict[str, Any]) -> None:
    """Put back what `rng_state` returned; if that fails the generators are as before.

    Raises:
        StateMismatch: a generator of another kind, or another number of CUDA devices: names it.
    """
    before = rng_state()
    try:
        _install(state)
    except StateMismatch:
        _install(before)
        raise


def _install(state: dict[str, Any]) -> None:
    devices = torch.cuda.device_count() if state.get("cuda") else 0
    if state.get("cuda") and len(state["cuda"]) != devices:
        raise StateMismatch(f"the cut has generator states of {len(state['cuda'])} CUDA devices, this host shows {devices}")
    which = "python"
    try:
        random.setstate(state["python"])
        which = "numpy"
        numpy.random.set_state(state["numpy"])
        which = "torch"
        torch.set_rng_state(state["torch"])
        which = "cuda"
        if state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
        raise StateMismatch(f"the {which} generator does not take its state from the cut: {type(error).__name__}: {error}") from error

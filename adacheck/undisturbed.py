"""What a script is inside of when it calls the checkpointer must not get into what the checkpointer makes.

A tensor made in inference mode cannot be written afterwards, and one made inside a transform of `torch.func` is not one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_P = ParamSpec("_P")
_R = TypeVar("_R")


def undisturbed(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a function run outside inference mode and transforms, from wherever it is called."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.inference_mode(False), temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return call

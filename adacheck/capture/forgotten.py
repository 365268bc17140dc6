"""Notices what a script trains with and did not put into `extra`: learning-rate schedulers and gradient scalers.

A restore would begin them anew, and nothing else would tell. Schedulers are looked for once, among what refers to the optimizers;
scalers show themselves when they let an optimizer step.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacheck.capture.accumulated import Gradients
from adacheck.capture.inventory import Inventory
from adacheck.capture.placement import Placement
from adacheck.capture.step_hooks import untraced

LOOK_AT_CALL = 2
"""The call of `ckpt.step()` at which schedulers are looked for: all that drives the training exists by then."""

LOOKING_CALLS = 20
"""Calls during which anything is looked for: a scaler may skip the first steps."""

FRAMES_MAX = 40
HELD_MAX = 100_000
"""Most objects that are looked at behind `extra`."""

_STATEFUL = ("state_dict", "load_state_dict", "step")
_NOT_SEARCHED = (type, ModuleType, torch.Tensor, torch.nn.Module, Optimizer)


class Forgotten:
    """Looks on while a script trains its first steps, from `begin` to `end`."""

    def __init__(self, inventory: Inventory, gradients: Gradients, extra: Mapping[str, object]) -> None:
        self._inventory, self._gradients, self._extra = inventory, gradients, extra
        self._placement = Placement()
        self._fired = False  # an attached optimizer stepped since the last call
        self._scaler: object | None = None
        self._scaler_judged = False
        self._handle: Any = None

    def begin(self) -> None:
        """Look on from here."""
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(untraced(self._before_step))

    def end(self) -> None:
        """Look on no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def after_call(self) -> list[str]:
        """What `ckpt.step()` has to say about the iteration that it ends; each is said once."""
        if self._handle is None:
            return []
        said = [self._placement.call(self._fired, self._fired or self._backward_was_run())]
        if self._placement.calls >= LOOK_AT_CALL:
            said.append(self._drivers())
        self._fired = False
        if self._placement.calls >= LOOKING_CALLS:
            self.end()
        return [line for line in said if line]

    def _drivers(self) -> str | None:
        """Schedulers, looked for once, and the scaler, which shows itself only at a step that it does not skip."""
        found = _schedulers(self._inventory.optimizers.values()) if self._placement.calls == LOOK_AT_CALL else []
        if self._scaler is not None and not self._scaler_judged:
            self._scaler_judged = True
            found.append(self._scaler)
        return _not_in_extra(found, self._extra) if found else None

    def _backward_was_run(self) -> bool:
        """Whether there may have been a backward pass since the last step: a scaler that skips its first steps leaves no trace of it."""
        if self._gradients.waiting():
            return True
        return any(isinstance(found, torch.amp.GradScaler) for found in gc.get_referrers(torch.amp.GradScaler, torch.cuda.amp.GradScaler))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is attached for attached in self._inventory.optimizers.values()):
            self._fired = True
            if self._scaler is None:
                self._scaler = _scaler_above()


def _scaler_above() -> object | None:
    """The gradient scaler that called the optimizer's step, if one did."""
    frame, depth = sys._getframe(1), 0
    while frame.f_back is not None and depth < FRAMES_MAX:
        frame, depth = frame.f_back, depth + 1
        if frame.f_code.co_name == "step" and isinstance(scaler := frame.f_locals.get("self"), torch.amp.GradScaler):
            return scaler if scaler.is_enabled() else None
    return None


def _schedulers(optimizers: Iterable[Optimizer]) -> list[object]:
    """Every live object that drives one of the optimizers: it has it as `optimizer`, and can be stepped, saved and loaded.

    Asks for referrers and never for all objects: other threads' tuples that are being built must not be held (CPython then fails).
    """
    attached = list(optimizers)
    holders = gc.get_referrers(*attached)
    owners = gc.get_referrers(*(holder for holder in holders if type(holder) is dict))
    found = {id(each): each for each in (*holders, *owners) if _drives(type(each))}
    return [each for each in found.values() if any(getattr(each, "optimizer", None) is optimizer for optimizer in attached)]


def _drives(kind: type) -> bool:
    defined = {name for base in kind.__mro__ for name in _STATEFUL if name in vars(base)}
    return len(defined) == len(_STATEFUL) and not issubclass(kind, _NOT_SEARCHED)


def _not_in_extra(found: list[object], extra: Mapping[str, object]) -> str | None:
    kept = _held(extra.values())
    missing = [each for each in found if id(each) not in kept]
    inner = _held([vars(each) for each in missing])
    missing = [each for each in missing if id(each) not in inner]
    if not missing:
        return None
    names = dict.fromkeys("scaler" if isinstance(m, torch.amp.GradScaler) else "scheduler" for m in missing)
    wanted = ", ".join(f'"{name}2": {name}' if name in extra else f'"{name}": {name}' for name in names)
    remedy = f"add {wanted} to extra in store.attach" if extra else f"write store.attach(..., extra={{{wanted}}})"
    kinds, several = " and ".join(sorted({_kind(each) for each in missing})), len(missing) > 1
    return (
        f"{kinds} {'drive' if several else 'drives'} the optimizer and {'are' if several else 'is'} not in extra: after a restore "
        f"{'they' if several else 'it'} would begin anew; {remedy}"
    )


def _held(roots: Iterable[object]) -> set[int]:
    """Identities of what the roots are and hold, through attributes, containers and closures; not through models, or globals."""
    waiting, seen = list(roots), set[int]()
    while waiting and len(seen) < HELD_MAX:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            waiting += [*(each.__closure__ or ()), *(each.__defaults__ or ())]
        elif not isinstance(each, _NOT_SEARCHED):
            waiting += gc.get_referents(each)
    return seen


def _kind(each: object) -> str:
    return type(each).__name__

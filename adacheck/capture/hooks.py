"""Turns what the optimizers do between two calls of `ckpt.step()` into one increment: events, gradients, values, refreshes.

The pre-step hook (kept last) sees exactly what the optimizer is given and copies it; the post-step hook (kept first) tells the
watch what the optimizer itself changed. Everything here runs in the trainer's thread and only reads the user's tensors.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from adacheck.capture import opaque
from adacheck.capture.accumulated import Gradients
from adacheck.capture.blocks import PoolEmpty
from adacheck.capture.clip import ClipCoefficients
from adacheck.capture.derived import apart, derived_now
from adacheck.capture.inventory import Inventory, LiveState
from adacheck.capture.pieces import PieceWriter
from adacheck.capture.quiet import QuietOptimizers
from adacheck.capture.step_hooks import StepHooks
from adacheck.capture.strangers import Strangers
from adacheck.capture.watch import Watch, version
from adacheck.errors import AdacheckError
from adacheck.keeper.assembly import left_out
from adacheck.keeper.certify import Certifier
from adacheck.keeper.submission import Draft, DraftGradient, DraftValue
from adacheck.kernel import certificate_key, hyperparameters, kernel_of, replayable, writes_gradients
from adacheck.manifests.record import Derived, Event, Group, Kernel, StateSpec
from adacheck.optimizers import Declaration, declaration
from adacheck.states import dtype_name
from adacheck.turn import Turn

_log = logging.getLogger("adacheck")


@dataclass
class _Step:
    """What has been captured since the last `ckpt.step()`."""

    events: list[Event] = field(default_factory=list)
    gradients: list[DraftGradient] = field(default_factory=list)
    stepped: dict[int, str] = field(default_factory=dict)  # states an optimizer changed without a gradient sent: reason
    certifying: set[int] = field(default_factory=set)  # whole and gradient, until the verdict
    incomparable: set[int] = field(default_factory=set)
    fired: set[str] = field(default_factory=set)


class Capture:
    """Hooks on the attached optimizers, from `install` to `remove`.

    `verdicts` returns the keeper's present `Certifier`; `writer` copies ranges into blocks and submits them; `failed` is told
    when no block came in time: capture is suspended then, and the optimizer goes on.
    """

    def __init__(
        self, inventory: Inventory, writer: PieceWriter, verdicts: Callable[[], Certifier], failed: Callable[[Exception], None]
    ) -> None:
        self.inventory = inventory
        self.known: set[int] = set()
        """States the chain has a complete value of; others go whole."""
        self.writer, self._verdicts, self._failed = writer, verdicts, failed
        self._clip, self._watch, self._quiet = ClipCoefficients(), Watch(), QuietOptimizers()
        self.gradients = Gradients(inventory)
        self.turn = Turn()
        self._strangers, self._hooks = Strangers(inventory), StepHooks(inventory.optimizers)
        self._step = _Step()
        self._signatures = {name: inventory.signature(name) for name in inventory.optimizers}
        self._depth: dict[str, int] = {}
        self._stepper: dict[str, threading.Thread] = {}  # who is, or was last, inside the step of each optimizer
        self._stepping: dict[str, set[int]] = {}  # states that the present call of each optimizer's step changes, as far as is known
        self._copying: list[tuple[int, torch.Tensor, int]] = []  # state, gradient, and its version when it was handed over
        self._sent: dict[int, StateSpec] = {}  # what each state was when it last went whole
        self._said: set[str] = set()
        self._blocked_s, self._pid = 0.0, os.getpid()
        self.suspended = False
        """Hooks do nothing: the keeper has failed, or state is being written by a restore."""

    def install(self) -> None:
        """Hook every optimizer; from here on the watch knows what every tensor looks like."""
        self._clip.install()
        self._strangers.install()
        self._hooks.install(partial(self._timed, self._before_step), partial(self._timed, self._after_step))
        self._watch.check(self.inventory.states.values())

    def remove(self) -> None:
        """Take every hook away."""
        self._clip.remove()
        self._strangers.remove()
        self._hooks.remove()
        self.gradients.remove()

    def restored(self, known: Iterable[int]) -> None:
        """The live tensors were just written from a cut that holds `known`: forget what was captured and seen before."""
        self._look()
        self._step, self._watch = _Step(), Watch()
        self._copying.clear()
        self._depth.clear()
        self._watch.check(self.inventory.states.values())
        self._quiet.begin(self.inventory)
        self.known = set(known)
        self._sent.clear()

    def finish(self, step: int, refresh: Mapping[int, list[tuple[str, int, int]]], drifted: frozenset[int]) -> Draft:
        """Capture the rest of the step and describe it all; watermarks in the draft are zero, for the caller to fill.

        Args:
            refresh: ranges to send for comparison, by state: (tensor, start, stop).
            drifted: states in which the keeper found a difference: they go whole.
        """
        done = self._step
        self._end_copying()
        self._look_again()
        states = self.inventory.states
        self._watch.check(states.values())
        moved = self._watch.collect()
        derived = self._derive(done, drifted)
        reasons = self._reasons(done, moved, drifted, apart(derived))
        derived = tuple(one for one in derived if one.state != one.from_state or one.state in reasons)
        omitted = left_out(derived)
        values = [self._send_value(states[n], reasons[n], omitted[n]) for n in sorted(reasons) if n in states]
        refreshes = tuple(n for n in sorted(refresh) if n in states and n not in reasons)
        for number in refreshes:
            self._send_refresh(states[number], refresh[number])
        removed = tuple(sorted(self.known - states.keys()))
        self.known = set(states)
        self._step = _Step()
        self._clip.clear()
        self._depth.clear()
        self._hooks.keep_order()
        gradients = tuple(g for g in done.gradients if g.state not in done.incomparable)
        comparable = frozenset(done.certifying & reasons.keys()) - done.incomparable - moved - drifted
        return Draft(step, tuple(done.events), gradients, tuple(values), derived, refreshes, removed, comparable, 0, 0)

    def _derive(self, done: _Step, drifted: frozenset[int]) -> tuple[Derived, ...]:
        """What need not be sent, since it equals a cast; not of states that must go whole, or that go as gradients."""
        verdicts, states = self._verdicts(), self.inventory.states
        if not (rules := verdicts.derivations.rules):
            return ()
        stepped = done.certifying | {gradient.state for gradient in done.gradients}
        return derived_now(rules, states, self._sent, stepped | drifted | verdicts.unsteady | (states.keys() - self.known))

    def _reasons(self, done: _Step, moved: frozenset[int], drifted: frozenset[int], derived: frozenset[int]) -> dict[int, str]:
        """Which states go whole in this cut, and why; the first reason in order of weight is the one told."""
        states = self.inventory.states
        reasons = self._quiet.reasons(self.inventory, done.fired, derived)
        strangers = self._strangers.collect() & states.keys()
        for number in (n for n, reason in reasons.items() if reason == "unseen" and states[n].optimizer is not None and n not in strangers):
            self._say_once(states[number].fqn, "its optimizer was not seen to change it: its gradients are gone before the step")
        reasons.update(dict.fromkeys(self.inventory.sharing(moved) | self.inventory.inference(), "unwatched"))
        reasons.update(dict.fromkeys(done.certifying, "certify"))
        reasons.update(done.stepped)
        reasons.update(dict.fromkeys(strangers, "unattached"))
        reasons.update(dict.fromkeys((drifted | self._verdicts().unsteady) & states.keys(), "drift"))
        reasons.update(dict.fromkeys(moved & states.keys(), "write"))
        reasons.update(dict.fromkeys(states.keys() - self.known, "first"))
        return {number: reason for number, reason in reasons.items() if number not in derived}

    def _look_again(self) -> None:
        self._look()
        for name, depth in self._depth.items():
            if depth and (stepper := self._stepper[name]) is not threading.current_thread() and stepper.is_alive():
                raise AdacheckError(
                    f"step() was called by thread {threading.current_thread().name} while thread {stepper.name} was in optimizer.step(): "
                    "call them from one thread at a time"
                )
            if depth:  # a step that raised: how far it came is unknown
                self._step.stepped.update({n: "raised" for n, live in self.inventory.states.items() if live.optimizer_name == name})

    @property
    def unattached(self) -> Mapping[str, str]:
        """Parameters that optimizers step which are not attached, with the class of the optimizer."""
        return self._strangers.unattached

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped since the last `ckpt.step()`."""
        return bool(self._step.fired)

    def take_blocked_s(self) -> float:
        """Seconds the hooks took since the last call."""
        blocked, self._blocked_s = self._blocked_s, 0.0
        return blocked

    def _timed(self, hook: Callable[..., None], name: str, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._pid:
            return  # a forked child, which has no keeper
        begun = time.perf_counter()
        try:
            with self.turn.of("optimizer.step()"):
                hook(name, optimizer, args, kwargs)
        except (PoolEmpty, AdacheckError) as error:
            self.suspended = True
            self._failed(error)
        finally:
            self._blocked_s += time.perf_counter() - begun

    def _before_step(self, name: str, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth[name], self._stepper[name] = self._depth.get(name, 0) + 1, threading.current_thread()
        if self.suspended or self._depth[name] > 1:
            return
        if self.inventory.signature(name) != self._signatures[name]:
            self._look()
        mine = self.inventory.by_optimizer[name]
        self._watch.check(mine)
        self._stepping[name] = set()
        if self._hooks.is_followed(name):
            self._go_whole([live for live in mine if live.parameter.grad is not None], "hook")
        if (why_not := _unreplayable_call(args, kwargs)) is not None:  # gradients may be still to come
            trained = [live for live in mine if live.parameter.requires_grad]
            self._step.fired.add(name)
            self._go_whole(trained, "optimizer")
            self._say_once(trained[0].fqn if trained else name, why_not)
        for kernel, groups in self._groups_by_kernel(optimizer).items():
            event = len(self._step.events)
            self._step.events.append(Event(name, kernel, tuple(described for described, _ in groups)))
            for _, group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and why_not is None:
                        live = self.inventory.by_parameter[id(parameter)]
                        self._step.fired.add(name)
                        self._stepping[name].add(live.state)
                        self._capture_gradient(parameter.grad, group, live, kernel, event, replayable(optimizer, group, parameter, kernel))

    def _look(self) -> None:
        self.inventory.refresh()
        self._signatures = {name: self.inventory.signature(name) for name in self.inventory.optimizers}

    def _go_whole(self, states: Iterable[LiveState], reason: str) -> None:
        for live in states:
            self._step.stepped[live.state] = reason
            self._step.incomparable.add(live.state)
            self._stepping[live.optimizer_name].add(live.state)

    def _groups_by_kernel(self, optimizer: torch.optim.Optimizer) -> dict[Kernel, list[tuple[Group, dict[str, Any]]]]:
        found: dict[Kernel, list[tuple[Group, dict[str, Any]]]] = {}
        for group in optimizer.param_groups:
            numbers = tuple(self.inventory.by_parameter[id(p)].state for p in group["params"])
            described = Group(numbers, opaque.encode("hyperparameters", hyperparameters(optimizer, group)))
            found.setdefault(kernel_of(optimizer, group), []).append((described, group))
        return found

    def _capture_gradient(
        self, gradient: torch.Tensor, group: dict[str, Any], live: LiveState, kernel: Kernel, event: int, why_not: str | None
    ) -> None:
        step, number = self._step, live.state
        verdicts = self._verdicts()
        key = certificate_key(kernel, live.parameter.dtype, gradient.dtype)
        if why_not is None and verdicts.denied(number, key):
            why_not = f"a replay of {kernel.optimizer_class} ({kernel.implementation}) did not give the same bits"
        if why_not is not None:
            step.stepped[number] = "optimizer"
            step.incomparable.add(number)
            self._say_once(live.fqn, why_not)
            return
        complete = _keeps_all(kernel, group, live.optimizer_entries())
        if not complete or not verdicts.certified(number, key):
            step.certifying.add(number)
        if not complete:
            step.incomparable.add(number)
        if number not in self.known or number in self._watch.moved:
            step.incomparable.add(number)  # it goes whole at the end of the step, and there is nothing to compare with
        if number not in step.incomparable:
            while_stepping = not writes_gradients(kernel)
            self.writer.send_gradient(number, event, gradient, self._clip.of(live.parameter), while_stepping=while_stepping)
            if while_stepping:
                self._copying.append((number, gradient, version(gradient)))
            step.gradients.append(DraftGradient(number, event, dtype_name(gradient.dtype)))

    def _end_copying(self) -> None:
        """Gradients are copied while the optimizer steps; one that was written meanwhile was not captured."""
        self.writer.wait()
        for number, gradient, before in self._copying:
            if version(gradient) != before:
                self._step.stepped[number] = "write"
                self._step.incomparable.add(number)
        self._copying.clear()

    def _after_step(self, name: str, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth[name] = self._depth.get(name, 1) - 1
        self._end_copying()
        if not self.suspended and self._depth[name] == 0:
            self._watch.accept(self.inventory.states[number] for number in self._stepping.get(name, ()))
            self.gradients.spend(name)
        elif self.suspended:
            self.gradients.look_away()

    def _send_value(self, live: LiveState, reason: str, omitted: Collection[str]) -> DraftValue:
        scalars = live.scalars()
        spec = live.spec(opaque.encode(f"optimizer entries of {live.fqn}", scalars) if scalars else b"")
        for name, tensor in live.tensors().items():
            if name not in omitted:
                self.writer.send_value(live.state, name, tensor)
        self._sent[live.state] = spec
        return DraftValue(spec, reason)

    def _send_refresh(self, live: LiveState, ranges: list[tuple[str, int, int]]) -> None:
        tensors = live.tensors()
        for name, start, stop in ranges:
            if name in tensors and stop <= tensors[name].numel():
                self.writer.send_refresh(live.state, name, tensors[name], start, stop)

    def _say_once(self, fqn: str, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            _log.warning("%s and others go whole at every step, not as gradients: %s", fqn, reason)


def _unreplayable_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a call of `step` with these arguments cannot be replayed; the first is the optimizer itself."""
    if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
        return "step(closure) evaluates the loss inside the optimizer"
    if any(given is not None for given in (*args[2:], *kwargs.values())):
        return "its optimizer's step() is given arguments, which are not recorded"
    return None


def _keeps_all(kernel: Kernel, group: Mapping[str, Any], entries: Mapping[str, Any]) -> bool:
    """Whether all the optimizer state exists that a step of this group needs: before, a replay would begin from nothing."""
    known = declaration(kernel.optimizer_class)
    return isinstance(known, Declaration) and known.complete(group, entries)

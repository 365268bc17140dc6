"""Gradients that `ckpt.step()` finds on the parameters: those that the script will still use belong to the cut.

In mid-accumulation that is their sum so far. One that an optimizer has used is spent, and what becomes of it is up to the script: most drop
it before the next backward pass; some zero it, which is not the same where a part of the model then takes no part; some add to it. To put
back what it held is right in every case, and costs its bytes at every step. So what the script does is learned, from the first spent
gradient of each parameter on (`_Habit`): what is dropped is not kept, what is zeroed comes back as zeros, all else as it is. Another tensor
in its place may hold what was added to it (`p.grad = p.grad / n`), and the same one again may not (a bucket of DistributedDataParallel).

A parameter that no attached optimizer has may have a master that one has. Which of them is not known, so its gradient counts as used by
each optimizer that stepped since it was last written to, and a habit is one for each such set: what one of two optimizers leaves may be
dropped where both have stepped, and added to where one of them rests.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle, unserializable_hook

from adacheck.capture.beside import Beside
from adacheck.capture.inventory import Inventory, LiveState
from adacheck.capture.watch import version
from adacheck.put_state import write_bytes
from adacheck.states import flat_bytes, local_tensor

UNKNOWN_BYTES_MAX = 64 * 2**20
"""Most bytes of gradients that a cut keeps because nobody knows yet what becomes of them.

They are encoded in the trainer's thread and held in memory. More are kept only if the script is known not to drop all of its gradients.
"""

_log = logging.getLogger("adacheck")


class _Mark(NamedTuple):
    """Noted beside a gradient when an optimizer has used it.

    Attributes:
        version: its version counter then.
        users: the optimizers that may have used it since it was last written to.
        cut: how many cuts there had been.
    """

    version: int
    users: frozenset[str]
    cut: int


class _Habit(NamedTuple):
    """What becomes of a parameter's spent gradients.

    Attributes:
        outlives: it is there at the next use; else it is dropped.
        zeroed: whether it is zeroed before the next gradient is added to it; `None` if that is not known.
        writes: how often it was written to up to the next use when that was learned. As long as that is the same, the script still does it.
        returns: a dropped one may be there again at the next use, as memory that the script fills with each new gradient.
    """

    outlives: bool
    zeroed: bool | None = None
    writes: int = 0
    returns: bool = False


class _Question(NamedTuple):
    """What becomes of the gradient that the last cut found.

    Attributes:
        users: as in its mark.
        restored: a restore has just put it back, in memory that is not the script's own.
        zeroed: as the next backward pass found it; `None` before that.
        summed: that pass has added to it.
        gone: it was dropped before that pass, or before a later one.
    """

    users: frozenset[str]
    restored: bool = False
    zeroed: bool | None = None
    summed: bool = False
    gone: bool = False


class Gradients:
    """What is known of the gradients of one training process."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._marks = Beside[_Mark]()
        self._habits: dict[tuple[str, frozenset[str]], _Habit] = {}
        self._questions: dict[str, _Question] = {}
        self._listening: dict[str, tuple[RemovableHandle, ...]] = {}
        self._left_out: set[str] = set()  # parameters whose gradient the last cut lacks
        self._cuts = 0
        self._any_outlives = self._said = False
        self._reached = False  # a backward pass has come by a parameter while somebody listened

    def spend(self, name: str) -> None:
        """Note that an optimizer has just stepped, and see what became of the gradients since the last cut."""
        user = frozenset((name,))
        for live in (*self._inventory.by_optimizer[name], *self._inventory.unowned):
            gradient = live.parameter.grad
            question = self._questions.pop(live.fqn, None) if self._questions else None
            mark = None if gradient is None else self._marks.get(gradient)
            if question is not None and (question.gone or mark is None):
                self._replaced(live, question, mark)
            if gradient is None or gradient.is_inference():  # which has no version counter, and is kept as it is
                continue
            now = version(gradient)
            if mark is not None and mark.cut < self._cuts and not (question is not None and question.gone):
                if live.optimizer is None and mark.version == now:  # nothing happened to it, and this optimizer may not be its user
                    if question is not None:
                        self._questions[live.fqn] = question
                    continue
                self._outlived(live, gradient, mark, None if question is None else question.zeroed)
            more = mark is not None and mark.cut == self._cuts and mark.version == now
            self._marks.put(gradient, _Mark(now, mark.users | user if mark and more else user, self._cuts))

    def of_cut(self, apart: Collection[str]) -> dict[str, Any]:
        """What of the present gradients a restore must put back, by name of the parameter, for `put_back`.

        Args:
            apart: parameters that an optimizer steps which is not attached.
        """
        self._cuts += 1
        self._questions = {fqn: question for fqn, question in self._questions.items() if question.gone}  # nothing undoes that
        self._left_out.clear()
        found: dict[str, Any] = {}
        unknown: list[tuple[LiveState, torch.Tensor, frozenset[str]]] = []
        for live in self._trained():
            gradient = live.parameter.grad
            if gradient is None or live.fqn in apart:
                continue
            mark = self._marks.get(gradient)
            if mark is None or mark.version != version(gradient):
                found[live.fqn] = {"users": [], "gradient": _content(gradient)}
                continue
            habit = self._habits.get((live.fqn, mark.users))
            if habit is None or habit.returns or (habit.outlives and habit.zeroed is None):
                self._ask(live, _Question(mark.users))
            if habit is None or (habit.outlives and habit.zeroed is None and not self._may_be_used(live)):
                unknown.append((live, gradient, mark.users))
            elif habit.outlives and (habit.zeroed or self._may_be_used(live)):
                found[live.fqn] = {"users": sorted(mark.users), "gradient": _zeros(gradient) if habit.zeroed else _content(gradient)}
            else:
                self._left_out.add(live.fqn)
        if self._any_outlives or sum(_bytes(gradient) for _, gradient, _ in unknown) <= UNKNOWN_BYTES_MAX:
            found |= {live.fqn: {"users": sorted(users), "gradient": _content(g)} for live, g, users in unknown}
        else:
            self._left_out.update(live.fqn for live, _, _ in unknown)
        return found

    def put_back(self, gradients: Mapping[str, Any]) -> None:
        """Give every parameter the gradient that `of_cut` told of, or none; the script may have changed, so nothing is known any more."""
        self._habits.clear()
        self._questions.clear()
        self._left_out.clear()
        for live in self._inventory.states.values():
            if live.kind != "parameter":
                continue
            saved = gradients.get(live.fqn)
            gradient = live.parameter.grad = None if saved is None else _made(live.parameter.detach(), saved["gradient"])
            if gradient is not None and saved is not None and saved["users"]:
                users = frozenset(saved["users"])
                self._marks.put(gradient, _Mark(version(gradient), users, self._cuts))
                self._ask(live, _Question(users, restored=True))
        self._cuts += 1

    def waiting(self) -> bool:
        """Whether a gradient is there that no optimizer has used yet."""
        gradients = [live.parameter.grad for states in self._inventory.by_optimizer.values() for live in states]
        marks = ((gradient, self._marks.get(gradient)) for gradient in gradients if gradient is not None)
        return any(mark is None or mark.version != version(gradient) for gradient, mark in marks)

    def look_away(self) -> None:
        """A step is not looked at: what it does to the gradients of the last cut will not be known."""
        self._questions.clear()

    def remove(self) -> None:
        """Take every hook away."""
        for fqn in list(self._listening):
            self._stop_listening(fqn)

    def _trained(self) -> Iterator[LiveState]:
        for name in self._inventory.optimizers:
            yield from (live for live in self._inventory.by_optimizer[name] if live.kind == "parameter")
        yield from self._inventory.unowned

    def _may_be_used(self, live: LiveState) -> bool:
        """Whether what a parameter's gradient sums up is for an optimizer: else it may be one that the script forgot to freeze."""
        return live.optimizer is not None or bool(self._inventory.masters)

    def _ask(self, live: LiveState, question: _Question) -> None:
        """Learn what becomes of this gradient: from the next backward passes, and from the next step."""
        self._stop_listening(live.fqn)
        self._questions[live.fqn] = question
        if live.parameter.requires_grad:
            hooks = [unserializable_hook(partial(hook, live)) for hook in (self._backward, self._accumulated)]  # type: ignore[no-untyped-call]
            before = live.parameter.register_hook(hooks[0])  # type: ignore[no-untyped-call]
            after = live.parameter.register_post_accumulate_grad_hook(hooks[1])  # type: ignore[no-untyped-call]
            self._listening[live.fqn] = (before, after)

    def _stop_listening(self, fqn: str) -> None:
        for handle in self._listening.pop(fqn, ()):
            handle.remove()

    def _backward(self, live: LiveState, _: torch.Tensor) -> None:
        """A new gradient has arrived, and is now added to the one that is there, if one is."""
        self._reached = True
        question = self._questions.get(live.fqn)
        if question is None or question.gone:
            self._stop_listening(live.fqn)
            return
        key, gradient = (live.fqn, question.users), live.parameter.grad
        if gradient is None:
            if not ((known := self._habits.get(key)) and known.returns):
                self._habits[key] = _Habit(outlives=False)
            self._questions[live.fqn] = question._replace(gone=True)
            self._stop_listening(live.fqn)
            return
        if question.zeroed is not None:
            return
        mark = self._marks.get(gradient)
        zeroed = (mark is None or mark.version != version(gradient)) and _is_zero(gradient)
        self._questions[live.fqn] = question._replace(zeroed=zeroed)
        if mark is None or torch.is_grad_enabled():  # the sum will be another tensor, which does not mean that this one is dropped
            self._habits[key] = _Habit(outlives=True, zeroed=False)
            self._any_outlives |= self._may_be_used(live)
            self._questions.pop(live.fqn, None)

    def _accumulated(self, live: LiveState, _: torch.Tensor) -> None:
        """It was added: `torch.autograd.grad` calls `_backward` too, and not this."""
        question = self._questions.get(live.fqn)
        if question is not None and question.zeroed is not None:
            self._questions[live.fqn] = question._replace(summed=True)

    def _replaced(self, live: LiveState, question: _Question, mark: _Mark | None) -> None:
        """A gradient that the last cut found spent was dropped before the next step, or there is another tensor in its place."""
        there = not question.gone and live.parameter.grad is not None
        if there and question.zeroed is None and self._reached and live.state not in self._inventory.masters:
            return  # it took no part, so what there was may have been carried on; masters get theirs from the script, and FSDP sets its own
        carried = there and question.summed  # as by `p.grad = p.grad / n`
        returns = question.gone and (question.restored or mark is not None)
        self._habits[live.fqn, question.users] = _Habit(carried, returns=returns)
        if carried:
            self._note_use(live)

    def _outlived(self, live: LiveState, gradient: torch.Tensor, mark: _Mark, zeroed: bool | None) -> None:
        """A gradient that the last cut found spent is there at the next step."""
        key, writes = (live.fqn, mark.users), version(gradient) - mark.version
        before = self._habits.get(key)
        if before is None or not before.outlives or before.zeroed is None:
            self._habits[key] = _Habit(True, zeroed, writes)
        elif before.zeroed and before.writes != writes and not _is_zero(gradient):
            self._habits[key] = _Habit(True, None, writes)
            if writes < before.writes:
                self._say_once(
                    f"the gradient of {live.fqn} was zeroed before each backward pass, and may not have been before the last one"
                )
        self._note_use(live)

    def _note_use(self, live: LiveState) -> None:
        """What a gradient held at the last cut has become part of what was stepped."""
        if self._may_be_used(live):
            self._any_outlives = True
            if live.fqn in self._left_out:
                self._say_once(f"the gradient of {live.fqn} was not dropped before the last backward pass")

    def _say_once(self, what: str) -> None:
        if not self._said:
            self._said = True
            _log.warning(
                "%s: cuts of the steps before lack it, later ones have it; zero_grad() belongs into every iteration that begins a new sum",
                what,
            )


def _bytes(gradient: torch.Tensor) -> int:
    held = (gradient._indices(), gradient._values()) if gradient.layout == torch.sparse_coo else (gradient,)
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _is_zero(gradient: torch.Tensor) -> bool:
    """Whether it is what `zero_()` makes of it, to the bit."""
    gradient = gradient.detach()
    if gradient.layout != torch.strided:
        return gradient.layout == torch.sparse_coo and gradient._nnz() == 0
    return not flat_bytes(local_tensor(gradient, "a gradient")).any()


def _zeros(gradient: torch.Tensor) -> Any:
    """What `zero_()` makes of it, as an opaque value."""
    return None if gradient.layout == torch.strided else _content(torch.zeros_like(gradient))


def _content(gradient: torch.Tensor) -> Any:
    """A gradient as an opaque value: `None` for zeros, a tuple for a sparse one."""
    gradient = gradient.detach()
    if gradient.layout == torch.sparse_coo:
        return (gradient._indices(), gradient._values(), list(gradient.shape), gradient.is_coalesced())
    return None if _is_zero(gradient) else local_tensor(gradient, "a gradient")


def _made(parameter: torch.Tensor, content: Any) -> torch.Tensor:
    if isinstance(content, tuple):
        indices, values, shape, coalesced = content
        return torch.sparse_coo_tensor(indices, values, shape, device=parameter.device, is_coalesced=coalesced, check_invariants=True)
    if content is None:
        return torch.zeros_like(parameter)
    made = torch.empty_like(parameter, dtype=content.dtype)
    write_bytes(local_tensor(made, "a gradient"), content)
    return made

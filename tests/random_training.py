"""A random training script as data: what is trained by what, how the loop goes, and what is done to it in mid-run.

A `Program` prints as the code that builds it, so that what a failure shows can be pasted into a test. Everything an iteration
does follows from the program, the iteration's number and the generators: a run can be repeated, and gone on with after a crash.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests import random_modules
from tests.random_modules import Part
from tests.training import Job


@dataclass(frozen=True)
class Optim:
    """One optimizer.

    Attributes:
        kind: name in `torch.optim`.
        options: its arguments; `lr="tensor"` is a tensor.
        parts: numbers of the parts it trains.
        grouped: each part is a parameter group of its own.
        rests: it does not step in iterations that are multiples of this; 0 for always.
        masters: it trains fp32 copies, which are copied back into the model after each step.
    """

    kind: str
    options: dict[str, Any]
    parts: tuple[int, ...]
    grouped: bool = False
    rests: int = 0
    masters: bool = False


@dataclass(frozen=True)
class Edit:
    """Something done in mid-run: key of `EDITS`, at the begin of iteration `step` or (`late`) at its end, to the nth candidate."""

    step: int
    what: str
    late: bool = False
    nth: int = 0


@dataclass(frozen=True)
class Program:
    """A training script.

    Attributes:
        added: (step, optimizer, part): this part becomes a group of that optimizer at the begin of that iteration.
        hooks: keys of `HOOKS`, registered before the store is attached.
        loop: `plain`, `accumulate`, `micro` (accumulation over two iterations), `twice`, `closure`, `backward` (each parameter has an
            optimizer of its own, which steps in the backward pass) or `scaler`.
        zeros: gradients are set to zero, not dropped.
        clip: `""`, `norm`, `norm loop` or `value`.
        scheduler: of the first optimizer, in `extra`; `""` for none.
        infinite: with a scaler, losses of iterations that are multiples of this are infinite.
    """

    parts: tuple[Part, ...]
    optims: tuple[Optim, ...]
    added: tuple[int, int, int] | None = None
    edits: tuple[Edit, ...] = ()
    hooks: tuple[str, ...] = ()
    loop: str = "plain"
    zeros: bool = False
    clip: str = ""
    scheduler: str = ""
    infinite: int = 0
    flush_denormal: bool = False

    def job(self, seed: int, done: int = 0) -> Job:
        """The script's objects as it would make them if it began after `done` iterations; values depend on the seed."""
        torch.manual_seed(seed)
        random.seed(seed)
        model = nn.ModuleList([random_modules.make(part) for part in self.parts])
        optimizers: dict[str, Optimizer] = {}
        for i, optim in enumerate(self.optims):
            made = [_optimizer(optim, groups) for groups in self._groups(optim, model)]
            optimizers |= {f"{i}.{k}" if k else f"{i}": optimizer for k, optimizer in enumerate(made)}
        extra: dict[str, Any] = {}
        if self.loop == "scaler":
            extra["scaler"] = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        if self.scheduler:
            extra["scheduler"] = _scheduler(self.scheduler, optimizers["0"])
        job = Job(model, optimizers, self.iterate, extra)
        for hook in self.hooks:
            if hook != "global":
                HOOKS[hook](job)
        if self.loop == "backward":
            for optimizer, parameter in _parameters(job):
                if parameter.requires_grad:
                    _hook(parameter, "register_post_accumulate_grad_hook", partial(_step_in_backward, optimizer))
        if self.added is not None and self.added[0] <= done:
            self._add(job)
        for edit in self.edits:
            if edit.what == "hook" and edit.step <= done:
                _edit(job, edit)
        return job

    def iterate(self, job: Job, n: int) -> None:
        """Iteration n, as `tests.training.Job` wants it."""
        if self.added is not None and self.added[0] == n:
            self._add(job)
        self._edit(job, n, late=False)
        loss = 0.0
        for _ in range(2 if self.loop == "twice" else 1):
            loss = self._step(job, n)
        if "scheduler" in job.extra:
            scheduler = job.extra["scheduler"]
            scheduler.step(loss) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
        self._edit(job, n, late=True)

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """What the script changes for the whole process: denormal mode and global hooks."""
        handle = register_optimizer_step_pre_hook(_halve) if "global" in self.hooks else None
        torch.set_flush_denormal(self.flush_denormal)
        try:
            yield
        finally:
            torch.set_flush_denormal(False)
            if handle is not None:
                handle.remove()

    def _groups(self, optim: Optim, model: nn.ModuleList) -> list[list[dict[str, Any]]]:
        """The parameter groups of each of its optimizers, of which there is one, or one by parameter."""
        parts = [_stepped(optim, model[part]) for part in optim.parts]
        if self.loop != "backward":
            return [[{"params": part} for part in parts] if optim.grouped else [{"params": [p for part in parts for p in part]}]]
        return [[{"params": [p]}] for part in parts for p in part]

    def _add(self, job: Job) -> None:
        assert self.added is not None
        _, i, part = self.added
        job.optimizers[str(i)].add_param_group({"params": _stepped(self.optims[i], job.model.get_submodule(str(part)))})

    def _edit(self, job: Job, n: int, *, late: bool) -> None:
        for edit in self.edits:
            if edit.step == n and edit.late == late:
                _edit(job, edit)

    def _step(self, job: Job, n: int) -> float:
        if self.loop != "micro" or n % 2:
            job.model.zero_grad(set_to_none=not self.zeros)
        total = 0.0
        if self.loop != "closure":
            for _ in range(2 if self.loop == "accumulate" else 1):
                total += self._backward(job, n)
        if self.loop == "backward" or (self.loop == "micro" and n % 2):
            return total
        for i, optimizer in enumerate(job.optimizers.values()):
            optim = self.optims[i]
            if not self._steps(optim, n):
                continue
            pairs = self._masters(job, i, optimizer)
            with _copied_back(pairs):
                if self.loop == "closure" or optim.kind == "LBFGS":
                    optimizer.step(partial(self._again, job, n, pairs))
                elif self.loop == "scaler":
                    self._scaled_step(job, optimizer, unscale=i % 2 == 0)
                else:
                    self._clip(optimizer)
                    optimizer.step()
        if self.loop == "scaler" and any(self._steps(optim, n) for optim in self.optims):
            job.extra["scaler"].update()
        return total

    def _masters(self, job: Job, i: int, optimizer: Optimizer) -> _Masters:
        """The masters that an optimizer steps, each with what it is a master of."""
        optim = self.optims[i]
        if not optim.masters:
            return []
        parts = [*optim.parts, *([self.added[2]] if self.added is not None and self.added[1] == i else [])]
        trained = [p for part in parts for p in job.model.get_submodule(str(part)).parameters()]
        masters = [p for group in optimizer.param_groups for p in group["params"]]  # fewer until the group is added
        return list(zip(masters, trained, strict=False))

    def _steps(self, optim: Optim, n: int) -> bool:
        return not optim.rests or n % optim.rests != 0

    def _scaled_step(self, job: Job, optimizer: Optimizer, *, unscale: bool) -> None:
        if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            return
        scaler = job.extra["scaler"]
        if unscale or self.clip:
            scaler.unscale_(optimizer)
            self._clip(optimizer)
        scaler.step(optimizer)

    def _again(self, job: Job, n: int, pairs: _Masters) -> float:
        job.model.zero_grad(set_to_none=not self.zeros)
        loss = self._backward(job, n)
        _give_gradients(pairs)
        return loss

    def _backward(self, job: Job, n: int) -> float:
        modules = [job.model.get_submodule(str(i)) for i, part in enumerate(self.parts) if part.used(n)]
        loss = sum((module() for module in modules), torch.zeros(())) * (0.5 + random.random())
        if self.infinite and n % self.infinite == 0:
            loss = loss * float("inf")
        if self.loop == "scaler":
            loss = job.extra["scaler"].scale(loss)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        return float(loss.detach())

    def _clip(self, optimizer: Optimizer) -> None:
        dense = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None and p.grad.layout == torch.strided]
        real = [p for p in dense if not p.is_complex()]
        if self.clip.startswith("norm"):
            nn.utils.clip_grad_norm_(dense, 0.05, foreach=None if self.clip == "norm" else False)
        elif self.clip and real:
            nn.utils.clip_grad_value_(real, 0.01)


_Masters = list[tuple[nn.Parameter, nn.Parameter]]


def _stepped(optim: Optim, part: nn.Module) -> list[nn.Parameter]:
    """What an optimizer steps of a part: its parameters, or masters of them."""
    return [nn.Parameter(p.detach().float().clone()) if optim.masters else p for p in part.parameters()]


def _give_gradients(pairs: _Masters) -> None:
    for master, parameter in pairs:
        master.grad = None if parameter.grad is None else parameter.grad.float()


@contextmanager
def _copied_back(pairs: _Masters) -> Iterator[None]:
    """Give masters the gradients of what they are masters of, and their values back afterwards."""
    _give_gradients(pairs)
    yield
    with torch.no_grad():
        for master, parameter in pairs:
            parameter.copy_(master)


def _optimizer(optim: Optim, groups: list[dict[str, Any]]) -> Optimizer:
    options = {name: torch.tensor(0.01) if value == "tensor" else value for name, value in optim.options.items()}
    for i, group in enumerate(groups):
        group |= {"note": i} if "lr" in optim.options else {"note": i, "lr": 0.02 / (i + 1)}
    optimizer: Optimizer = getattr(torch.optim, optim.kind)(groups, **options)
    return optimizer


def _step_in_backward(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _scheduler(kind: str, optimizer: Optimizer) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "StepLR": lambda: lr_scheduler.StepLR(optimizer, 2, 0.5),
        "CosineAnnealingLR": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "OneCycleLR": lambda: lr_scheduler.OneCycleLR(optimizer, 0.02, 40, cycle_momentum="betas" in optimizer.defaults),
        "ReduceLROnPlateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
        "SequentialLR": lambda: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
        ),
    }
    return makers[kind]()


SCHEDULERS = ("StepLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR")


def _parameters(job: Job) -> list[tuple[Optimizer, nn.Parameter]]:
    return [(o, p) for o in job.optimizers.values() for g in o.param_groups for p in g["params"]]


def _halve(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def _halve_own(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def _on_parameters(job: Job, register: str, hook: Callable[[torch.Tensor], Any]) -> None:
    for _, parameter in _parameters(job)[:2]:
        if parameter.requires_grad:
            _hook(parameter, register, hook)


def _hook(parameter: torch.Tensor, register: str, hook: Callable[[torch.Tensor], Any]) -> None:
    getattr(parameter, register)(hook)


def _shrink(optimizer: Optimizer, *_: Any) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].mul_(0.99)


HOOKS: dict[str, Callable[[Job], Any]] = {
    "global": lambda job: None,  # see `Program.surroundings`
    "gradients": lambda job: [optimizer.register_step_pre_hook(_halve) for optimizer in job.optimizers.values()],
    "weights": lambda job: [optimizer.register_step_post_hook(_shrink) for optimizer in job.optimizers.values()],
    "tensors": lambda job: _on_parameters(job, "register_hook", lambda g: g * 0.5),
    "modules": lambda job: [module.register_forward_hook(lambda m, a, out: out * 1.5) for module in job.model.children()],
    "accumulated": lambda job: _on_parameters(job, "register_post_accumulate_grad_hook", _halve_own),
}
"""Hooks that change gradients, weights or outputs."""


def _edit(job: Job, edit: Edit) -> None:
    parameters = _parameters(job)
    optimizer, parameter = parameters[edit.nth % len(parameters)]
    with torch.no_grad():
        EDITS[edit.what](job, optimizer, parameter)


def _replace(job: Job, optimizer: Optimizer, parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.9


def _scale_lr(job: Job, optimizer: Optimizer, parameter: nn.Parameter) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5


def _change_decay(job: Job, optimizer: Optimizer, parameter: nn.Parameter) -> None:
    group = optimizer.param_groups[-1]
    sparse = any(isinstance(module, nn.Embedding) and module.sparse for module in job.model.modules())
    if "weight_decay" in group and not sparse:  # which goes with no sparse gradient
        group["weight_decay"] = 0.0 if group["weight_decay"] else 0.02


def _scale_moments(job: Job, optimizer: Optimizer, parameter: nn.Parameter) -> None:
    for name, entry in optimizer.state.get(parameter, {}).items():
        if isinstance(entry, torch.Tensor) and name != "step":
            entry.mul_(0.5)


def _swap(job: Job, optimizer: Optimizer, parameter: nn.Parameter) -> None:
    for module in job.model.children():
        if isinstance(module, random_modules.Averaged):
            module.swap()


def _load_model(job: Job, optimizer: Optimizer, parameter: nn.Parameter) -> None:
    content = {name: tensor.clone() for name, tensor in job.model.state_dict().items() if 0 not in tensor.stride()}
    job.model.load_state_dict(content, strict=False)  # torch refuses to write expanded tensors


def _rebind(job: Job, optimizer: Optimizer, parameter: nn.Parameter) -> None:
    for module in job.model.children():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.clone())


EDITS: dict[str, Callable[[Job, Optimizer, nn.Parameter], Any]] = {
    "write": lambda job, optimizer, p: p.mul_(0.9),
    "replace": _replace,
    "freeze": lambda job, optimizer, p: p.requires_grad_(False),
    "unfreeze": lambda job, optimizer, p: p.requires_grad_(True),
    "lr": _scale_lr,
    "decay": _change_decay,
    "note": lambda job, optimizer, p: optimizer.param_groups[-1].update(note=[1, 2.5, ("three", None)]),
    "moments": _scale_moments,
    "clear": lambda job, optimizer, p: optimizer.state.clear(),
    "clear one": lambda job, optimizer, p: optimizer.state.pop(p, None),
    "load optimizer": lambda job, optimizer, p: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "load model": _load_model,
    "swap": _swap,
    "rebind": _rebind,
    "hook": lambda job, optimizer, p: [each.register_step_pre_hook(_halve) for each in job.optimizers.values()],
}
"""What can be done to an optimizer and one of its parameters in mid-run; `hook` is what a script that starts again does again."""

"""Which optimizers' steps are replayed from gradients, and what must be known of each: one declaration a class.

torch's own classes are declared here; another package declares its own under the entry-point group `adacheck.replay`. The name of a
class that a store holds leads to code in these two ways alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from adacheck.manifests.record import Kernel
from adacheck.states import dtype_name

GROUP = "adacheck.replay"
"""Entry-point group: the name of an entry is the dotted name of the class, its object a `Declaration`."""

SETTINGS: Mapping[str, Callable[[], str]] = {
    "default_dtype": lambda: dtype_name(torch.get_default_dtype()),
    "mkldnn": lambda: str(torch.backends.mkldnn.enabled),
}
"""Process-wide settings of torch that the bits of some steps depend on; replay refuses where they differ."""

Refuse = Callable[[Mapping[str, Any], torch.Tensor, Kernel], str | None]


def _refuse_nothing(group: Mapping[str, Any], parameter: torch.Tensor, kernel: Kernel) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What replay must know of an optimizer class besides its code. It must be deterministic, and a step of one parameter must not
    depend on any other parameter: states are replayed in other batches than they were stepped in.

    Attributes:
        kind: the class whose `step()` is replayed. A subclass is another class.
        entries: names in `optimizer.state[parameter]` that must exist before a gradient tells all of a step.
        entries_if: further ones where a hyperparameter is neither zero nor False: `{"momentum": ("momentum_buffer",)}`.
        branches: hyperparameters that switch parts of the step on and off by being zero; booleans always count as such.
        attributes: what `step()` reads from the optimizer itself besides `param_groups` and `state`: recorded at each step, as far
            as the optimizer has it, and set before the replay. Numbers, strings, tensors, and containers of them.
        elementwise: each element's result depends on that element alone. Else replay takes the recorded number of threads.
        writes_gradients: whether `step()` may write into gradients. If not, they are copied while it runs.
        settings: which of `SETTINGS` the bits depend on.
        version: of the code, where torch's own version does not say it; another one is refused.
        refuse: why gradients of this parameter cannot be replayed under this kernel, for the user; `None` if they can.
        make: gives an instance to replay with, for a class whose `step()` needs what only its constructor sets up.
    """

    kind: type[Optimizer]
    entries: tuple[str, ...] = ()
    entries_if: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    branches: tuple[str, ...] = ("weight_decay",)
    attributes: tuple[str, ...] = ()
    elementwise: bool = False
    writes_gradients: bool = True
    settings: tuple[str, ...] = ()
    version: str = ""
    refuse: Refuse = _refuse_nothing
    make: Callable[[], Optimizer] | None = None

    def complete(self, group: Mapping[str, Any], entries: Mapping[str, Any]) -> bool:
        """Whether all the optimizer state exists that a step of this group needs: before, a replay would begin from nothing."""
        further = (names for key, names in self.entries_if.items() if group.get(key))
        return all(entries.get(name) is not None for names in (self.entries, *further) for name in names)

    def environment_flags(self) -> tuple[str, ...]:
        """The kernel flags that say what of this process the bits depend on, as `name=value`."""
        flags = tuple(f"{name}={SETTINGS[name]()}" for name in self.settings)
        return (*flags, f"version={self.version}") if self.version else flags

    def blank(self) -> Optimizer:
        """An instance with nothing to optimize."""
        if self.make is not None:
            return self.make()
        optimizer = self.kind.__new__(self.kind)
        optimizer.__dict__.update(defaults={"differentiable": False}, state={}, param_groups=[])
        return optimizer


def class_name(optimizer_class: type) -> str:
    """Dotted name of an optimizer class, as recorded."""
    return f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"


@cache
def declaration(name: str) -> Declaration | str:
    """What is declared of the class with this dotted name; if nothing is, a text that says why."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    point = _entry_points().get(name)
    if point is None:
        return f"{name} is not declared for replay (CONTRIBUTING.md tells how a package declares its optimizer)"
    where = f"the declaration of {name} in {point.value}"
    try:
        declared = point.load()
    except Exception as error:  # another package's import may raise anything, and must not end the training
        return f"{where} cannot be loaded ({type(error).__name__}: {error}); reinstall its package"
    if not isinstance(declared, Declaration) or class_name(declared.kind) != name or not SETTINGS.keys() >= set(declared.settings):
        return f"{where} is no adacheck.optimizers.Declaration of this class; report it to its package"
    return declared


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _refuse_sgd(group: Mapping[str, Any], parameter: torch.Tensor, kernel: Kernel) -> str | None:
    if kernel.implementation == "fused" and group["momentum"] != 0 and parameter.dtype in (torch.bfloat16, torch.float16):
        return "fused SGD with momentum gives other bits from run to run below fp32"
    return None


def _refuse_adafactor(group: Mapping[str, Any], parameter: torch.Tensor, kernel: Kernel) -> str | None:
    if "mixed=True" in kernel.flags:
        return "Adafactor takes its epsilon from one dtype for all of a group, and this group has several"
    return None


_SCALED: Any = {"attributes": ("grad_scale", "found_inf")}
"""Those whose fused kernels do a gradient scaler's work: it puts these two on the optimizer while it steps."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_MOMENTUM = {"momentum": ("momentum_buffer",)}
_AMSGRAD = {"amsgrad": ("max_exp_avg_sq",)}


def _torch(kind: type[Optimizer], *entries: str, elementwise: bool = True, **further: Any) -> Declaration:
    return Declaration(kind=kind, entries=entries, elementwise=elementwise, writes_gradients=False, **further)


BUILT_IN: Mapping[str, Declaration] = {
    class_name(declared.kind): declared
    for declared in (
        _torch(torch.optim.Adam, *_MOMENTS, entries_if=_AMSGRAD, **_SCALED),
        _torch(torch.optim.AdamW, *_MOMENTS, entries_if=_AMSGRAD, **_SCALED),
        _torch(torch.optim.SGD, entries_if=_MOMENTUM, branches=("momentum", "weight_decay"), refuse=_refuse_sgd, **_SCALED),
        _torch(
            torch.optim.RMSprop,
            "step",
            "square_avg",
            entries_if={**_MOMENTUM, "centered": ("grad_avg",)},
            branches=("momentum", "weight_decay"),
        ),
        _torch(torch.optim.Adagrad, "step", "sum", **_SCALED),
        _torch(torch.optim.Adamax, "step", "exp_avg", "exp_inf"),
        _torch(torch.optim.NAdam, *_MOMENTS, "mu_product"),
        _torch(torch.optim.RAdam, *_MOMENTS),
        _torch(torch.optim.Adadelta, "step", "square_avg", "acc_delta"),
        _torch(torch.optim.ASGD, "step", "eta", "mu", "ax", settings=("default_dtype",)),
        _torch(torch.optim.Rprop, "step", "prev", "step_size", branches=()),
        _torch(torch.optim.Adafactor, "step", elementwise=False, refuse=_refuse_adafactor),
        _torch(torch.optim.Muon, "momentum_buffer", elementwise=False, settings=("mkldnn",)),
    )
}
"""torch's own classes by dotted name. LBFGS evaluates the loss in its step, SparseAdam is given sparse gradients: neither is here."""

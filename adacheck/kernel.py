"""What the "same kernel" is: everything besides inputs and hyperparameters that decides the bits of an optimizer step.

Replay sets what it can (implementation, threads, denormal mode) and refuses what it cannot (torch build, CPU capability, device).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, _default_to_fused_or_foreach

from adacheck.manifests.record import Kernel
from adacheck.states import dtype_name
from adacheck.threads import flushes_denormals

CLASSES: Mapping[str, type[Optimizer]] = {
    "torch.optim.adam.Adam": torch.optim.Adam,
    "torch.optim.adamw.AdamW": torch.optim.AdamW,
    "torch.optim.sgd.SGD": torch.optim.SGD,
}
"""The optimizers whose gradients can be replayed, by the name under which a kernel is recorded. No other name is ever resolved."""

WIDE = (torch.float32, torch.float64)
"""Parameter dtypes whose steps give the same bits for any thread count and grouping, whatever the implementation (measured)."""

_ALIKE = ({"AVX2", "AVX512"},)
_CHOICES = ("fused", "foreach")
_BRANCHES = ("momentum", "weight_decay")
_DTYPES = ("gradient", "parameter")
_WHOLE_VECTORS = 64


@dataclass(frozen=True, slots=True)
class Environment:
    """What this process and thread compute with; the fields are those of `Kernel`."""

    torch_build: str
    cpu_capability: str
    threads: int
    flush_denormal: bool


def environment() -> Environment:
    """The environment of the calling thread; call it on the thread that steps."""
    build = f"{torch.__version__} {torch.version.git_version} {platform.machine()}"
    return Environment(build, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), flushes_denormals())


def class_name(optimizer_class: type) -> str:
    """Dotted name of an optimizer class, as recorded."""
    return f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"


def kernel_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Kernel:
    """The kernel that `optimizer.step()` would run for `group` (one of its `param_groups`) if called now, from this thread."""
    parameters = list(group["params"])
    here = environment()
    name = class_name(type(optimizer))
    implementation = implementation_of(name, group, parameters)
    return Kernel(
        optimizer_class=name,
        implementation=implementation,
        flags=tuple(sorted(_flags(group) + _mixed(optimizer, implementation, group, parameters))),
        device=parameters[0].device.type if parameters else "cpu",
        torch_build=here.torch_build,
        cpu_capability=here.cpu_capability,
        threads=here.threads,
        flush_denormal=here.flush_denormal,
    )


def implementation_of(name: str, group: Mapping[str, Any], parameters: list[torch.Tensor]) -> str:
    """`fused`, `foreach` or `loop`: what the class's own rule chooses for these hyperparameters and parameters; `default` if unknown.

    The rules are those of `adam()` and `sgd()` in torch/optim, the same from torch 2.9 to 2.13.
    """
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is None and foreach is None:
        if name not in CLASSES and not ("foreach" in group and name.startswith("torch.optim.")):
            return "default"
        fused, foreach = _default_to_fused_or_foreach(parameters, bool(group.get("differentiable")), use_fused=False)
        if foreach and isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable"):
            foreach = False
    if fused and foreach:
        return "foreach" if name == "torch.optim.sgd.SGD" else "fused"
    return "fused" if fused else "foreach" if foreach else "loop"


def certificate_key(kernel: Kernel, parameter: torch.dtype, gradient: torch.dtype) -> Kernel:
    """The kernel with the dtypes it is run for among its flags: what a state's certificate is given under."""
    dtypes = (f"gradient={dtype_name(gradient)}", f"parameter={dtype_name(parameter)}")
    others = (flag for flag in kernel.flags if flag.partition("=")[0] not in _DTYPES)
    return replace(kernel, flags=tuple(sorted((*others, *dtypes))))


def refusal(recorded: Kernel, here: Environment) -> str | None:
    """Why a step of the recorded kernel cannot be replayed here bit for bit, naming both sides; `None` if it can.

    Thread count and denormal mode are no reason: replay sets them.
    """
    if recorded.optimizer_class not in CLASSES:
        return f"recorded with optimizer {recorded.optimizer_class}, and this release replays only {', '.join(CLASSES)}"
    if recorded.device != "cpu":
        return f"recorded on device {recorded.device}, and replay here is on cpu"
    if recorded.torch_build != here.torch_build:
        return f"recorded with torch build {recorded.torch_build}, and here is {here.torch_build}"
    if recorded.cpu_capability != here.cpu_capability and not any(
        {recorded.cpu_capability, here.cpu_capability} <= same for same in _ALIKE
    ):
        return (
            f"recorded with CPU capability {recorded.cpu_capability}, and here is {here.cpu_capability} "
            "(ATEN_CPU_CAPABILITY can lower it where the processor has more)"
        )
    return None


def replayable(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> str | None:
    """`None` if gradients of `parameter` may go to certification; else the reason why its state goes as `value`, for the user.

    Call it inside the pre-step hook: a gradient scaler's scale is on the optimizer only then.
    """
    kind = type(optimizer)
    name = class_name(kind)
    if CLASSES.get(name) is not kind:
        return f"this release replays only {', '.join(known.__name__ for known in CLASSES.values())}, not {name}"
    if parameter.device.type != "cpu":
        return f"its parameter is on {parameter.device.type}, and this release replays on cpu only"
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return "a gradient scaler unscales inside its fused kernel"
    if flushes_denormals() and torch.get_num_threads() > 1:
        return "denormals are flushed in one of several threads, so the bits depend on which of them computes an element"
    if group.get("differentiable") or optimizer.defaults.get("differentiable"):
        return "differentiable=True keeps a graph through the step"
    if parameter.is_complex():
        return "its parameter is complex"
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        return "its gradient is sparse"
    if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
        return f"its gradient is {parameter.grad.dtype} and its parameter {parameter.dtype}"
    if parameter.grad is not None and not _in_one_order(parameter, parameter.grad):
        return "its parameter or gradient does not lie in memory in row-major order"
    if kind is torch.optim.SGD and group["momentum"] != 0 and parameter.dtype in (torch.bfloat16, torch.float16):
        fused = implementation_of(name, group, [parameter]) == "fused"
        return "fused SGD with momentum gives other bits from run to run below fp32" if fused else None
    return None


def _in_one_order(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a step computes every element as it does on row-major copies of both.

    Vectorised kernels compute the last elements in memory, and strided ones, by other code. A dense tensor in another order
    (channels last) is as good where whole vectors fit into it, and its gradient lies the same way.
    """
    if parameter.is_contiguous() and gradient.is_contiguous():
        return True
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    dense = parameter.permute(order).is_contiguous() and gradient.stride() == parameter.stride()
    return dense and parameter.numel() % _WHOLE_VECTORS == 0


def _mixed(optimizer: Optimizer, implementation: str, group: Mapping[str, Any], parameters: list[torch.Tensor]) -> list[str]:
    """Say so where one parameter's state or gradient changes the code that runs for the whole group.

    SGD's foreach leaves its `_foreach_` operations for all if one momentum buffer is still to be made, or one gradient is sparse;
    below fp32 that gives other bits (5,927 of 40,003 elements). Nothing is certified for such steps, so they go as values.
    """
    stepping = [parameter for parameter in parameters if parameter.grad is not None]
    if implementation != "foreach" or not isinstance(optimizer, torch.optim.SGD) or all(p.dtype in WIDE for p in stepping):
        return []
    fresh = [optimizer.state.get(parameter, {}).get("momentum_buffer") is None for parameter in stepping]
    sparse = [parameter.grad.layout != torch.strided for parameter in stepping if parameter.grad is not None]
    return ["mixed=True"] if (group["momentum"] != 0 and any(fresh) and not all(fresh)) or any(sparse) else []


def _flags(group: Mapping[str, Any]) -> list[str]:
    """The class's switches, and whether the factors are zero that switch whole branches of the step on and off."""
    switches = [f"{key}={value}" for key, value in group.items() if isinstance(value, bool) and key not in _CHOICES]
    branches = [f"{key}={'zero' if group[key] == 0 else 'nonzero'}" for key in _BRANCHES if key in group]
    return switches + branches

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
from adacheck.optimizers import Declaration, class_name, declaration
from adacheck.states import dtype_name
from adacheck.threads import flushes_denormals

WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Parameter dtypes whose elementwise steps give the same bits for any thread count and grouping, whatever the implementation (measured)."""

ATTRIBUTE = "optimizer."
"""Begins the names of those recorded hyperparameters that were the optimizer's own attributes, not entries of its group."""

_ALIKE = ({"AVX2", "AVX512"},)
_CHOICES = ("fused", "foreach")
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


def kernel_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Kernel:
    """The kernel that `optimizer.step()` would run for `group` (one of its `param_groups`) if called now, from this thread."""
    parameters = list(group["params"])
    here = environment()
    name = class_name(type(optimizer))
    implementation = implementation_of(name, group, parameters)
    return Kernel(
        optimizer_class=name,
        implementation=implementation,
        flags=tuple(sorted(_flags(optimizer, declaration(name), group) + _mixed(optimizer, implementation, group, parameters))),
        device=parameters[0].device.type if parameters else "cpu",
        torch_build=here.torch_build,
        cpu_capability=here.cpu_capability,
        threads=here.threads,
        flush_denormal=here.flush_denormal,
    )


def implementation_of(name: str, group: Mapping[str, Any], parameters: list[torch.Tensor]) -> str:
    """`fused`, `foreach` or `loop`: what the class's own rule chooses for these hyperparameters and parameters; `default` if there
    is no choice, or its rule is not known.

    The rules are those of the functions in torch/optim (`adam()`, `sgd()`, ...), the same from torch 2.9 to 2.13.
    """
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is None and foreach is None:
        if "foreach" not in group or not name.startswith("torch.optim."):
            return "default"
        fused, foreach = _default_to_fused_or_foreach(parameters, bool(group.get("differentiable")), use_fused=False)
        if foreach and isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable"):
            foreach = False
    if fused and foreach:
        return "foreach" if name == "torch.optim.sgd.SGD" else "fused"
    return "fused" if fused else "foreach" if foreach else "loop"


def hyperparameters(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """What a step of `group` uses besides tensors of its states: its entries, and the declared attributes of the optimizer."""
    found = {name: entry for name, entry in group.items() if name != "params"}
    known = declaration(class_name(type(optimizer)))
    if isinstance(known, Declaration):
        found.update({ATTRIBUTE + name: getattr(optimizer, name) for name in known.attributes if hasattr(optimizer, name)})
    return found


def writes_gradients(kernel: Kernel) -> bool:
    """Whether the step itself may write into the gradients it is given."""
    known = declaration(kernel.optimizer_class)
    if isinstance(known, str) or known.writes_gradients:
        return True
    nesterov = kernel.implementation == "foreach" and "nesterov=True" in kernel.flags  # of torch's own only SGD's foreach
    return nesterov or "grad_scale=nonzero" in kernel.flags  # fused kernels unscale in place


def certificate_key(kernel: Kernel, parameter: torch.dtype, gradient: torch.dtype) -> Kernel:
    """The kernel with the dtypes it is run for among its flags: what a state's certificate is given under."""
    dtypes = (f"gradient={dtype_name(gradient)}", f"parameter={dtype_name(parameter)}")
    others = (flag for flag in kernel.flags if flag.partition("=")[0] not in _DTYPES)
    return replace(kernel, flags=tuple(sorted((*others, *dtypes))))


def refusal(recorded: Kernel, here: Environment) -> str | None:
    """Why a step of the recorded kernel cannot be replayed here bit for bit, naming both sides; `None` if it can.

    Thread count and denormal mode are no reason: replay sets them.
    """
    known = declaration(recorded.optimizer_class)
    if isinstance(known, str):
        return known
    for flag in known.environment_flags():
        if flag not in recorded.flags:
            name = flag.partition("=")[0]
            there = [one for one in recorded.flags if one.partition("=")[0] == name]
            return f"recorded with {', '.join(there) or f'no {name}'}, and here is {flag}"
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


def replayable(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, kernel: Kernel) -> str | None:
    """`None` if gradients of `parameter` may go to certification; else the reason why its state goes as `value`, for the user.

    `kernel` is that of the group, from inside the pre-step hook.
    """
    known = declaration(kernel.optimizer_class)
    if isinstance(known, str):
        return known
    if known.kind is not type(optimizer):
        return f"its optimizer is another {kernel.optimizer_class} than the one declared for replay"
    if parameter.device.type != "cpu":
        return f"its parameter is on {parameter.device.type}, and this release replays on cpu only"
    if flushes_denormals() and torch.get_num_threads() > 1:
        return "denormals are flushed in one of several threads, so the bits depend on which of them computes an element"
    if group.get("differentiable") or optimizer.defaults.get("differentiable"):
        return "differentiable=True keeps a graph through the step"
    if parameter.grad is not None:
        if parameter.grad.layout != torch.strided:
            return "its gradient is sparse"
        if parameter.grad.dtype != parameter.dtype:
            return f"its gradient is {parameter.grad.dtype} and its parameter {parameter.dtype}"
        if not _in_one_order(parameter, parameter.grad, known.elementwise):
            return "its parameter or gradient does not lie in memory in row-major order"
    return known.refuse(group, parameter, kernel)


def _in_one_order(parameter: torch.Tensor, gradient: torch.Tensor, elementwise: bool) -> bool:
    """Whether a step computes every element as it does on row-major copies of both.

    Reductions and products take another order where memory has one. Vectorised kernels compute the last elements in memory, and
    strided ones, by other code. A dense tensor in another order (channels last) is as good where whole vectors fit into it, and its
    gradient lies the same way.
    """
    if parameter.is_contiguous() and gradient.is_contiguous():
        return True
    if not elementwise:
        return False
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    dense = parameter.permute(order).is_contiguous() and gradient.stride() == parameter.stride()
    return dense and parameter.numel() % _WHOLE_VECTORS == 0


def _mixed(optimizer: Optimizer, implementation: str, group: Mapping[str, Any], parameters: list[torch.Tensor]) -> list[str]:
    """Say so where one parameter's state or gradient changes the code that runs for the whole group.

    SGD's foreach leaves its `_foreach_` operations for all if one momentum buffer is still to be made, or one gradient is sparse
    (Adagrad's too); below fp32 that gives other bits (5,927 of 40,003 elements). Nothing is certified for such steps, so they go as
    values. Adafactor takes its default epsilon from the dtype of whichever parameter comes first.
    """
    if isinstance(optimizer, torch.optim.Adafactor):
        dtypes = {parameter.dtype for parameter in parameters if parameter.grad is not None}
        return ["mixed=True"] if len(dtypes) > 1 and group["eps"][0] is None else []
    if implementation != "foreach" or not isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)):
        return []
    stepping = [parameter for parameter in parameters if parameter.grad is not None]
    if all(p.dtype in WIDE for p in stepping):
        return []
    sparse = [parameter.grad.layout != torch.strided for parameter in stepping if parameter.grad is not None]
    fresh = [optimizer.state.get(parameter, {}).get("momentum_buffer") is None for parameter in stepping]
    return ["mixed=True"] if (group.get("momentum") and any(fresh) and not all(fresh)) or any(sparse) else []


def _flags(optimizer: Optimizer, known: Declaration | str, group: Mapping[str, Any]) -> list[str]:
    """The class's switches, whether the factors are zero that switch whole branches of the step on and off, and its environment."""
    switches = [f"{key}={value}" for key, value in group.items() if isinstance(value, bool) and key not in _CHOICES]
    if isinstance(known, str):
        return switches
    switches += [_branch(key, group[key]) for key in known.branches if key in group]
    switches += [_branch(name, value) for name in known.attributes if (value := getattr(optimizer, name, None)) is not None]
    return [*switches, *known.environment_flags()]


def _branch(name: str, value: Any) -> str:
    """How a factor decides what runs: by being zero. Anything that is no number counts as not zero."""
    zero = isinstance(value, (int, float, torch.Tensor)) and bool(value == 0)
    return f"{name}={'zero' if zero else 'nonzero'}"

"""How fast gradients are narrowed, widened and replayed, beside a bare fused AdamW step with the same widening, on one thread.

Part of `rates.py`; `measure()` returns the figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from adacheck.keeper.narrow import Narrower, widen
from adacheck.keeper.replay import GradientMemory, Replayed, Replayer, batches
from adacheck.kernel import kernel_of
from adacheck.manifests.record import Kernel, StateSpec
from adacheck.states import State, segment_ranges, tensor_bytes, tensor_spec
from adacheck.threads import arithmetic

_COEFFICIENT = 0.4372861981391907  # an fp32 value, as `clip_grad_norm_` would multiply with
_Stored = list[tuple[int, int, bytes]]


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds for one step of all parameters (medians), and parameters per second."""

    parameters: int
    tensors: int
    bare_s: float
    replay_s: float
    copy_s: float
    narrow_s: float
    narrow_clipped_s: float

    @property
    def ratio(self) -> float:
        """Rate of replay over that of the bare step."""
        return self.bare_s / self.replay_s


def gpt_shapes(layers: int = 12, width: int = 576, vocabulary: int = 8192, context: int = 1024) -> list[tuple[int, ...]]:
    """Shapes of a GPT's parameters, about 53.2 million in 148 tensors with the defaults."""
    block: list[tuple[int, ...]] = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *(block * layers), (width,), (width,)]


def measure(repeats: int = 9, shapes: list[tuple[int, ...]] | None = None) -> Rates:
    """Time both ways of stepping the same parameters in turn, from the same stored gradients, and narrowing by itself."""
    shapes = gpt_shapes() if shapes is None else shapes
    with arithmetic(threads=1):
        values = [torch.randn(shape).mul_(0.02) for shape in shapes]
        gradients = [torch.randn(shape).bfloat16().float() for shape in shapes]
        stored = [_narrowed(gradient) for gradient in gradients]
        bare, kernel = _bare(values, stored)
        replay = _replay(values, stored, kernel)
        bare_s, replay_s = _in_turn((bare, replay), repeats)
        ways = (_copy(gradients), _narrow(gradients, None), _narrow(gradients, _COEFFICIENT))
        copy_s, narrow_s, narrow_clipped_s = _in_turn(ways, repeats)
    count = sum(value.numel() for value in values)
    return Rates(count, len(shapes), bare_s, replay_s, copy_s, narrow_s, narrow_clipped_s)


def _narrowed(gradient: torch.Tensor) -> _Stored:
    narrower, raw = Narrower(), tensor_bytes(gradient)
    ranges = segment_ranges(tensor_spec("grad", gradient))
    return [(start, stop, bytes(narrower.narrow(raw[4 * start : 4 * stop], "float32").stored)) for start, stop in ranges]


def _widen(stored: _Stored, gradient: torch.Tensor) -> None:
    flat = gradient.view(-1)
    for start, stop, content in stored:
        widen(content, "bf16", 1.0, flat[start:stop])


def _bare(values: list[torch.Tensor], stored: list[_Stored]) -> tuple[Callable[[], None], Kernel]:
    """Widen every gradient, then one step of a fused AdamW over all parameters."""
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()

    def step() -> None:
        for parameter, segments in zip(parameters, stored, strict=True):
            assert parameter.grad is not None
            _widen(segments, parameter.grad)
        optimizer.step()

    return step, kernel_of(optimizer, optimizer.param_groups[0])


def _replay(values: list[torch.Tensor], stored: list[_Stored], kernel: Kernel) -> Callable[[], None]:
    """The keeper's way: batch by batch widen into the same memory, and step the shadows of the batch."""
    states = []
    for number, value in enumerate(values):
        spec = StateSpec(number, str(number), (), "parameter", "optimizer", True, (tensor_spec("param", value),), b"")
        states.append(State(spec, {"param": value.clone()}, {}))
    hyperparameters = torch.optim.AdamW([torch.zeros(1)], fused=True).param_groups[0]
    replayer, memory = Replayer(), GradientMemory()

    def step() -> None:
        for batch in batches(list(zip(states, stored, strict=True)), lambda item: 4 * item[0].tensors["param"].numel()):
            gradients = memory.take([(state.spec.tensors[0].shape, torch.float32) for state, _ in batch])
            for gradient, (_, segments) in zip(gradients, batch, strict=True):
                _widen(segments, gradient)
            members = [Replayed(state, hyperparameters, gradient) for gradient, (state, _) in zip(gradients, batch, strict=True)]
            replayer.apply(kernel, members)

    step()
    return step


def _narrow(gradients: list[torch.Tensor], coefficient: float | None) -> Callable[[], None]:
    clipped = [gradient * coefficient for gradient in gradients] if coefficient is not None else gradients
    narrower = Narrower()

    def step() -> None:
        for gradient in clipped:
            raw = tensor_bytes(gradient)
            for start, stop in segment_ranges(tensor_spec("grad", gradient)):
                narrower.narrow(raw[4 * start : 4 * stop], "float32", coefficient)

    return step


def _copy(gradients: list[torch.Tensor]) -> Callable[[], None]:
    copies = [torch.zeros_like(gradient) for gradient in gradients]

    def step() -> None:
        for gradient, into in zip(gradients, copies, strict=True):
            into.copy_(gradient)

    return step


def _in_turn(ways: tuple[Callable[[], None], ...], repeats: int) -> list[float]:
    """Median seconds of functions, called in turn so that all see the same noise."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats):
        for way, times in zip(ways, seconds, strict=True):
            started = time.perf_counter()
            way()
            times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in seconds]

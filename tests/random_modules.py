"""The parts random models are made of: each is one form that parameters and buffers take in the field.

Calling a part draws its input from torch's generator and gives a loss, a real fp32 scalar; so any parts can be put together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

HALVES = ("bfloat16", "float16")
FLOATS = ("float32", "float64", *HALVES)


@dataclass(frozen=True)
class Part:
    """What one part of a model is.

    Attributes:
        form: key of `FORMS`.
        dtype: of its parameters.
        rests: the part is used in an iteration n unless n is a multiple of this; 0 for always used.
    """

    form: str
    dtype: str = "float32"
    rests: int = 0

    def used(self, n: int) -> bool:
        """Whether iteration n uses it: else its gradients stay `None`."""
        return not self.rests or n % self.rests != 0


class Dense(nn.Module):
    """A layer on random rows, with dropout so that the generator is used."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self) -> torch.Tensor:
        x = torch.randn(self.shape).to(next(self.parameters()).dtype)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        out: torch.Tensor = nn.functional.dropout(self.layer(x), 0.2)
        return out.float().square().mean()


class Lookup(nn.Module):
    """An embedding, whose gradient is sparse if asked for."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=sparse)

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self.table(torch.randint(0, 9, (5,)))
        return out.float().square().mean()


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.back.weight = self.there.weight

    def forward(self) -> torch.Tensor:
        x = torch.randn(3, 6).to(self.there.weight.dtype)
        out: torch.Tensor = self.back(torch.tanh(self.there(x)))
        return out.float().square().mean()


class Bare(nn.Module):
    """One parameter as it is given, decayed towards noise; `plain` is what the loss is computed from."""

    def __init__(self, value: torch.Tensor, plain: Callable[[torch.Tensor], torch.Tensor] = lambda p: p) -> None:
        super().__init__()
        self.value, self._plain = nn.Parameter(value), plain

    def forward(self) -> torch.Tensor:
        plain = self._plain(self.value)
        return ((plain - torch.randn(plain.shape).to(plain.dtype)).float().square().sum()) / 7


class Frozen(nn.Module):
    """A trained bias on a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.layer.weight.requires_grad_(False)

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self.layer(torch.randn(2, 5).to(self.layer.bias.dtype))
        return out.float().square().mean()


class Counting(nn.Module):
    """A weight beside buffers of every kind, written in place, rebound, or left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("last", torch.zeros(0), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 3, dtype=torch.int32))
        self.register_buffer("constant", torch.randn(3, 2).t())
        self.register_buffer("spread", torch.randn(1, 3).expand(4, 3))
        self.register_buffer("eighth", torch.randn(5).to(torch.float8_e4m3fn))

    def forward(self) -> torch.Tensor:
        x = torch.randn(4)
        self.get_buffer("count").add_(1)
        self.get_buffer("mask").logical_xor_(x > 0)
        self.get_buffer("mean").lerp_(x.bfloat16(), 0.25)
        self.last = x[: int(self.get_buffer("count")) % 4].clone()
        kept = torch.where(self.get_buffer("mask"), self.weight, self.weight.detach())
        return (kept.float() * x - self.get_buffer("mean").float()).square().mean()


class Averaged(nn.Module):
    """A layer with a moving average of itself, as evaluations use: parameters that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average = nn.Linear(5, 3), nn.Linear(5, 3)
        self.average.requires_grad_(False)

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.layer.parameters(), strict=True):
                mean.lerp_(now, 0.25)
        out: torch.Tensor = self.layer(torch.randn(2, 5).to(self.layer.weight.dtype))
        return out.float().square().mean()

    def swap(self) -> None:
        """Exchange the two, as before and after an evaluation."""
        for mean, now in zip(self.average.parameters(), self.layer.parameters(), strict=True):
            mean.data, now.data = now.data, mean.data


def _channels_last(layer: nn.Conv2d) -> nn.Conv2d:
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    return layer


FORMS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Dense(nn.Linear(7, 5), 3, 7),
    "matrix": lambda: Dense(nn.Linear(6, 4, bias=False), 3, 6),
    "wide": lambda: Dense(nn.Linear(150, 130), 2, 150),
    "norms": lambda: Dense(nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.BatchNorm1d(6)), 4, 5),
    "conv": lambda: Dense(_channels_last(nn.Conv2d(3, 4, 3)), 2, 3, 5, 5),
    "lookup": lambda: Lookup(sparse=False),
    "sparse": lambda: Lookup(sparse=True),
    "tied": Tied,
    "complex": lambda: Bare(torch.randn(3, 4, dtype=torch.complex64), torch.view_as_real),
    "scalar": lambda: Bare(torch.randn(())),
    "empty": lambda: Bare(torch.randn(0, 3)),
    "transposed": lambda: Bare(torch.randn(5, 7).t()),
    "slice": lambda: Bare(torch.randn(6, 9)[1:5, ::2]),
    "frozen": Frozen,
    "counting": Counting,
    "averaged": Averaged,
    "weight_norm": lambda: Dense(weight_norm(nn.Linear(6, 5)), 3, 6),
    "spectral_norm": lambda: Dense(spectral_norm(nn.Linear(6, 5)), 3, 6),
}
"""Every form, made with random values."""

ONLY_FP32 = frozenset({"complex", "counting", "spectral_norm", "norms"})
"""Forms whose parts have dtypes of their own."""


def make(part: Part) -> nn.Module:
    """The module of a part."""
    module = FORMS[part.form]()
    return module if part.form in ONLY_FP32 else module.to(getattr(torch, part.dtype))

"""What travels how: every optimizer class of torch with its kernels, flags and dtypes, the payload of each, and why it is that one.

`tests/test_replay.py` compares a replay with the live optimizer for every entry, `tests/test_optimizer_table.py` trains, kills and
restores each, and compares the README's table with this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

FUSED: dict[str, Any] = {"fused": True}
FOREACH: dict[str, Any] = {"foreach": True}
LOOP: dict[str, Any] = {"foreach": False}
CHOICES = {"fused": FUSED, "foreach": FOREACH, "loop": LOOP, "default": {}}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


@dataclass(frozen=True)
class Kind:
    """An optimizer class: its kernels, and the sets of flags that are tried with every one of them, by what they are called."""

    kernels: tuple[str, ...]
    variants: dict[str, dict[str, Any]]
    shapes: str = "any"

    def flags(self, kernel: str) -> list[str]:
        """Names of the variants that torch has with this kernel: on the CPU only its fused ones take `capturable`."""
        return [flags for flags in self.variants if kernel == "fused" or flags != "capturable"]


@dataclass(frozen=True)
class Entry:
    """One line of the full table; `reason` says why the payload is not `gradient`."""

    kind: str
    kernel: str
    flags: str
    dtype: torch.dtype
    reason: str | None

    @property
    def payload(self) -> str:
        """`gradient`, `value`, or `refused` where torch itself does."""
        return "gradient" if self.reason is None else "refused" if self.reason == TORCH_REFUSES else "value"

    @property
    def name(self) -> str:
        """Of a test."""
        return f"{self.kind}-{self.kernel}-{self.flags.replace(', ', '+')}-{str(self.dtype)[6:]}"

    def options(self) -> dict[str, Any]:
        """For the class's constructor."""
        options = {**KINDS[self.kind].variants[self.flags], **CHOICES[self.kernel]}
        if self.kernel == "loop" and "fused" in KINDS[self.kind].kernels:
            options["fused"] = False
        return options


ALL, BOTH = ("fused", "foreach", "loop"), ("foreach", "loop")
MAXIMIZE = {"maximize": True, "weight_decay": 0.1}
ADAM: dict[str, dict[str, Any]] = {
    "none": {},
    "amsgrad": {"amsgrad": True},
    "maximize, weight_decay": MAXIMIZE,
    "capturable": {"capturable": True},
}
KINDS = {
    "Adam": Kind(ALL, ADAM),
    "AdamW": Kind(ALL, ADAM),
    "SGD": Kind(
        ALL,
        {
            "none": {},
            "momentum": {"momentum": 0.9},
            "nesterov, weight_decay": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            "dampening, maximize": {"momentum": 0.9, "dampening": 0.3, "maximize": True},
        },
    ),
    "RMSprop": Kind(BOTH, {"none": {}, "centered, momentum": {"centered": True, "momentum": 0.9}, "maximize, weight_decay": MAXIMIZE}),
    "Adagrad": Kind(ALL, {"none": {}, "lr_decay": {"lr_decay": 0.1}, "maximize, weight_decay": MAXIMIZE}),
    "Adamax": Kind(BOTH, {"none": {}, "maximize, weight_decay": MAXIMIZE}),
    "NAdam": Kind(
        BOTH,
        {
            "none": {},
            "momentum_decay": {"momentum_decay": 0.1},
            "decoupled_weight_decay, maximize": {**MAXIMIZE, "decoupled_weight_decay": True},
        },
    ),
    "RAdam": Kind(
        BOTH,
        {
            "none": {},
            "weight_decay": {"weight_decay": 0.1},
            "decoupled_weight_decay, maximize": {**MAXIMIZE, "decoupled_weight_decay": True},
        },
    ),
    "Adadelta": Kind(BOTH, {"none": {}, "maximize, weight_decay": MAXIMIZE}),
    "ASGD": Kind(BOTH, {"none": {}, "t0": {"t0": 2.0, "lambd": 0.1}, "maximize, weight_decay": {**MAXIMIZE, "t0": 2.0}}),
    "Rprop": Kind(BOTH, {"none": {}, "maximize": {"maximize": True}}),
    "Adafactor": Kind(BOTH, {"none": {}, "maximize, weight_decay": MAXIMIZE}, shapes="not empty"),
    "Muon": Kind(("default",), {"nesterov": {}, "none": {"nesterov": False, "weight_decay": 0.0}}, shapes="matrices"),
}
TORCH_REFUSES = "torch itself has no such kernel"


def reason(kind: str, kernel: str, flags: str, dtype: torch.dtype) -> str | None:
    """Why this entry does not travel as gradients; `None` if it does."""
    if dtype.is_complex and (kernel == "fused" or kind in ("Adafactor", "Muon")):
        return TORCH_REFUSES
    if kind == "SGD" and kernel == "fused" and flags != "none" and dtype in (torch.bfloat16, torch.float16):
        return "fused SGD with momentum gives other bits from run to run below fp32"
    return None


def entries() -> Iterator[Entry]:
    """Every line."""
    for kind, known in KINDS.items():
        for kernel in known.kernels:
            for flags in known.flags(kernel):
                for dtype in DTYPES:
                    yield Entry(kind, kernel, flags, dtype, reason(kind, kernel, flags, dtype))


def first_of_each_kernel() -> list[Entry]:
    """One entry for each class, kernel and dtype: what takes long is tried with these."""
    first = {(entry.kind, entry.kernel, entry.dtype): entry for entry in reversed(list(entries()))}
    return list(reversed(first.values()))


def markdown() -> list[str]:
    """The lines of the README's table, and its notes: classes, kernels and flags of equal payloads share a line."""
    notes = list(dict.fromkeys(entry.reason for entry in entries() if entry.payload == "value"))
    lines: dict[tuple[str, tuple[str, ...]], tuple[list[str], list[str]]] = {}
    for kind, known in KINDS.items():
        for kernel in known.kernels:
            for flags in known.flags(kernel):
                cells = tuple(_cell(reason(kind, kernel, flags, dtype), notes) for dtype in DTYPES)
                kernels, variants = lines.setdefault((kind, cells), ([], []))
                kernels.append(kernel) if kernel not in kernels else None
                variants.append(flags) if flags not in variants else None
    head = ["optimizer", "kernels", "flags tried", *(str(dtype).removeprefix("torch.") for dtype in DTYPES)]
    rows = [[kind, ", ".join(kernels), "; ".join(variants), *cells] for (kind, cells), (kernels, variants) in lines.items()]
    table = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return [*table, "", *(f"{at}. {note}" for at, note in enumerate(notes, 1))]


def _cell(why: str | None, notes: list[str | None]) -> str:
    if why is None:
        return "gradient"
    return "–" if why == TORCH_REFUSES else f"value ({notes.index(why) + 1})"

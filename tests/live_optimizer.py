"""A live optimizer that tells what a keeper would be told of it, with shadows to compare it to."""

from __future__ import annotations

import copy
from typing import Any

import torch

from adacheck.keeper.replay import spec_of
from adacheck.kernel import hyperparameters, kernel_of
from adacheck.manifests.record import StateSpec
from adacheck.same import differing
from adacheck.states import State, tensor_spec

SHAPES = {
    "any": ((7,), (63,), (65,), (1000,), (33, 17, 19), (), (0,), (40_003,)),
    "not empty": ((7,), (63,), (65, 67), (1000,), (33, 17, 19), (), (1,), (181, 221)),
    "matrices": ((7, 1), (63, 1), (65, 67), (10, 100), (33, 323), (1, 1), (1, 5), (181, 221)),
}


class Live:
    """A trainer of two groups, and the shadows that a keeper has of it."""

    def __init__(
        self,
        kind: Any,
        options: dict[str, Any],
        dtype: torch.dtype,
        lr: float | torch.Tensor = 1e-2,
        shapes: str = "any",
        large: bool = True,
    ) -> None:
        self.random = torch.Generator().manual_seed(11)
        self.dtype = dtype
        self.parameters = [torch.nn.Parameter(self._normal(shape)) for shape in (SHAPES[shapes] if large else SHAPES[shapes][:-1])]
        groups = [{"params": self.parameters[::2]}, {"params": self.parameters[1::2], "lr": 0.5 * lr}]
        self.optimizer = kind(groups, lr=lr, **options)
        self.shadows: list[State] = []
        self.steps = 0
        self.look_again()

    def look_again(self) -> None:
        """Make the shadows what the trainer has now."""
        self.shadows = [from_live(self, number) for number in range(len(self.parameters))]

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        return torch.randn(shape, generator=self.random, dtype=wide).to(self.dtype)

    def step(self) -> list[tuple[Any, list[tuple[int, dict[str, Any], torch.Tensor]]]]:
        """Set clipped gradients and changed hyperparameters, step, and return what a keeper is told: kernel and gradients by group."""
        self.steps += 1
        for number, parameter in enumerate(self.parameters):
            scale = 10.0 ** -((self.steps + number) % 4)
            parameter.grad = self._normal(parameter.shape) * scale
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        if self.steps > 1:  # fused SGD itself fails where only some of its parameters have had a first step
            self.parameters[self.steps % 4].grad = None
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
            if "betas" in group:
                group["betas"] = (0.9 - 0.01 * self.steps, 0.999 - 0.001 * self.steps)
            if group.get("momentum"):
                group["momentum"] = group["momentum"] * 0.99
        events = self.recorded()
        self.optimizer.step()
        return events

    def recorded(self) -> list[tuple[Any, list[tuple[int, dict[str, Any], torch.Tensor]]]]:
        """What a keeper is told of a step with the present gradients."""
        return [self._of_group(group) for group in self.optimizer.param_groups]

    def _of_group(self, group: dict[str, Any]) -> tuple[Any, list[tuple[int, dict[str, Any], torch.Tensor]]]:
        used = copy.deepcopy(hyperparameters(self.optimizer, group))
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        given = [(numbers[id(p)], used, p.grad.clone()) for p in group["params"] if p.grad is not None]
        return kernel_of(self.optimizer, group), given

    def unequal(self) -> dict[int, tuple[str, ...]]:
        """Names of the tensors in which shadows differ from the trainer, by state."""
        found = {}
        for number, (parameter, shadow) in enumerate(zip(self.parameters, self.shadows, strict=True)):
            entries = self.optimizer.state.get(parameter, {})
            tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
            names = differing({"param": parameter, **tensors}, shadow.tensors)
            assert shadow.scalars == {name: value for name, value in entries.items() if name not in tensors}
            assert [spec.name for spec in shadow.spec.tensors] == ["param", *sorted(tensors)] == list(shadow.tensors)
            if names:
                found[number] = names
        return found


def shadow(number: int, parameter: torch.Tensor) -> State:
    tensors = {"param": parameter.detach().clone()}
    spec = StateSpec(number, f"layer.{number}", (), "parameter", "optimizer", True, (tensor_spec("param", tensors["param"]),), b"")
    return State(spec, tensors, {})


def from_live(live: Live, number: int) -> State:
    made = shadow(number, live.parameters[number])
    entries = copy.deepcopy(live.optimizer.state.get(live.parameters[number], {}))
    made.tensors.update({name: value for name, value in sorted(entries.items()) if isinstance(value, torch.Tensor)})
    made.scalars.update({name: value for name, value in entries.items() if not isinstance(value, torch.Tensor)})
    made.spec = spec_of(made.spec, made.tensors, made.scalars)
    return made

"""Our hooks around the steps of the attached optimizers: before, as the last of all; after, as the first of all.

Whoever hooks a step to change gradients comes before us, and whoever writes weights after it is noticed. Compilers do not trace them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

StepHook = Callable[[str, Optimizer, tuple[Any, ...], dict[str, Any]], None]
"""Called with the optimizer's name, the optimizer, and the arguments of `step`."""


def untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """The same hook, left alone where the step around it is compiled."""
    disabled: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


class StepHooks:
    """One pair of hooks for each optimizer, from `install` to `remove`."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._handles: dict[str, tuple[Any, Any]] = {}

    def install(self, before: StepHook, after: StepHook) -> None:
        """Hook every optimizer."""
        for name, optimizer in self._optimizers.items():
            pre = optimizer.register_step_pre_hook(untraced(partial(before, name)))
            post = optimizer.register_step_post_hook(untraced(partial(after, name)))
            self._handles[name] = (pre, post)
        self.keep_order()

    def remove(self) -> None:
        """Take every hook away."""
        for pre, post in self._handles.values():
            pre.remove()
            post.remove()
        self._handles.clear()

    def keep_order(self) -> None:
        """Be last before and first after again, among hooks that were registered since."""
        for name, (pre, post) in self._handles.items():
            pre_hooks: Any = self._optimizers[name]._optimizer_step_pre_hooks
            post_hooks: Any = self._optimizers[name]._optimizer_step_post_hooks
            if pre.id in pre_hooks and post.id in post_hooks:
                pre_hooks.move_to_end(pre.id)
                post_hooks.move_to_end(post.id, last=False)

    def is_followed(self, name: str) -> bool:
        """Whether a hook that was registered since `keep_order` will still see, and perhaps change, the gradients."""
        if name not in self._handles:
            return False
        pre, _ = self._handles[name]
        hooks: Any = self._optimizers[name]._optimizer_step_pre_hooks
        return pre.id in hooks and next(reversed(hooks)) != pre.id

"""Names as the model itself gives them, without what wrappers add."""

from __future__ import annotations

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


def plain_name(name: str) -> str:
    """The name without what `DataParallel`, `torch.compile` and the like put between."""
    for wrapper in _WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name

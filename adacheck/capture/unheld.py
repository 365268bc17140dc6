"""What `state_dict()` of a model holds and no cut will: named when attaching, since a restore could not put it back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from adacheck.capture.inventory import Inventory, span_of
from adacheck.capture.plain_names import plain_name

NAMED_MAX = 5
_CHECKPOINTED = "_checkpoint_wrapped_module."  # its own `state_dict()` leaves it out


def unheld(inventory: Inventory) -> str | None:
    """One line on keys that come from a module's own code or from hooks, if there are any."""
    try:
        keys = list(_unheld(inventory))
    except Exception as error:  # the script's own code
        return (
            f"state_dict() of the model raised {type(error).__name__} ({error}): whether it holds more than parameters, buffers and "
            "extra state, which is what a cut holds, is not known"
        )
    if not keys:
        return None
    some = ", ".join(keys[:NAMED_MAX]) + (f" and {len(keys) - NAMED_MAX} more" if len(keys) > NAMED_MAX else "")
    return (
        f"state_dict() of the model has {some}, which are neither parameters nor buffers nor what get_extra_state() gives: no cut holds "
        "them; if they cannot be made anew, make buffers of them, define get_extra_state() and set_extra_state(), or put them into extra"
    )


def _unheld(inventory: Inventory) -> Iterator[str]:
    names = {name.replace(_CHECKPOINTED, "") for live in inventory.states.values() for name in (live.fqn, *live.aliases)}
    names |= {key.replace(_CHECKPOINTED, "") for key in (*inventory.extra_states.modules, *inventory.extra_states.shared)}
    spans = [span_of(live.current()) for live in inventory.states.values()]
    for prefix, model in inventory.models.items():
        for key, value in model.state_dict().items():
            if names.isdisjoint(((prefix + plain_name(key)).replace(_CHECKPOINTED, ""), prefix + key)) and not _lies_in(value, spans):
                yield prefix + key


def _lies_in(value: object, spans: list[tuple[int, int]]) -> bool:
    """Whether it is a part of what a cut holds, under another name."""
    if not isinstance(value, torch.Tensor):
        return False
    start, stop = span_of(value)
    return start == stop or any(first <= start and stop <= last for first, last in spans)

"""Finds, at each step, which tensors need not be sent because they equal the cast of another one right now.

The keeper names the pairs to look at (`keeper/derive.py`); whether a pair holds is decided here, by comparing all its bytes. That
costs less than sending the tensor, and nothing can go wrong between: a clamp, a skipped copy or a write through NumPy is seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from adacheck.capture.inventory import LiveState
from adacheck.cast import is_cast
from adacheck.keeper.derive import Tensor
from adacheck.manifests.record import Derived, StateSpec


def derived_now(
    rules: Mapping[Tensor, Tensor], states: Mapping[int, LiveState], sent: Mapping[int, StateSpec], excluded: Collection[int]
) -> tuple[Derived, ...]:
    """The tensors that equal the cast of their source, of those that there are rules for.

    Args:
        sent: what the keeper knows each state to be. A state that is derived as a whole must be that still, to its last flag.
        excluded: states that go another way, or whole, whatever they equal.
    """
    found: list[Derived] = []
    for (number, name), (from_number, from_name) in sorted(rules.items()):
        live, source = states.get(number), states.get(from_number)
        if live is None or source is None or number in excluded:
            continue
        tensors, wide = live.tensors(), source.tensors()
        if name not in tensors or from_name not in wide:
            continue
        if number != from_number and (len(tensors) > 1 or live.scalars() or sent.get(number) != live.spec(b"")):
            continue
        if is_cast(tensors[name], wide[from_name]):
            found.append(Derived(number, name, from_number, from_name))
    return tuple(found)


def apart(derived: Collection[Derived]) -> frozenset[int]:
    """The states of which nothing at all is sent: their source is in another state."""
    return frozenset(one.state for one in derived if one.state != one.from_state)

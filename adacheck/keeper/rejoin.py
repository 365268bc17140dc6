"""Brings NVMe back in after it had stopped: a new base of every state from the shadow, and the increments still in the window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from adacheck.backends.base import Item
from adacheck.keeper import certify
from adacheck.keeper.nvme import NvmeCopy
from adacheck.keeper.protocol import Copy, rebuilt, receive
from adacheck.keeper.scan import held_of
from adacheck.keeper.stored import slot_key
from adacheck.keeper.window import Logged, Window
from adacheck.manifests import chain as links
from adacheck.manifests import keys
from adacheck.manifests.encoding import encode
from adacheck.states import State


def rejoin(copy: NvmeCopy, memory: Copy, shadow: Mapping[int, State], window: Window, certifier: certify.Certifier) -> Copy:
    """Rebuild `copy` from what memory holds, and give the protocol's view of it. Ask `progress.may_catch_up` first.

    Call it between two steps of the log, with the shadow standing still. What was there goes first: a full checkpoint covers it.

    Raises:
        BackendError: it still cannot be written; the copy holds nothing of use then, and stays lost.
    """
    step, certificates = memory.least_base, certify.certificates(certifier)
    waiting = [window.get(at) for at in window.steps() if at > step]
    link = waiting[0].linked.previous if waiting else _last_link(window, step, copy)
    copy.clear(step, link)
    copy.roll([state for _, state in sorted(shadow.items())], step, certificates)
    fresh = rebuilt(memory.incarnation, memory.fence, step, shadow)
    for logged in waiting:
        copy.put_many(_items(copy, logged, window))
        copy.logged(logged.increment, logged.linked.link)
        fresh, _ = receive(fresh, memory.incarnation, logged.increment.step, held_of(logged.increment))
    return fresh


def _last_link(window: Window, step: int, copy: NvmeCopy) -> bytes:
    last = window.last
    return last.linked.link if last is not None and last.increment.step == step else copy.chain.anchor_link


def _items(copy: NvmeCopy, logged: Logged, window: Window) -> Iterator[Item]:
    key = keys.increment(copy.chain.generation, logged.increment.step)
    for segment in links.segments(logged.increment):
        yield slot_key(key, segment.slot), window.stored(logged.increment.step, segment)
    yield key, encode(logged.linked)

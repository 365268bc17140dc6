"""Whether a log on NVMe was written under the incarnations of this object tier.

An object tier that was copied has the run of its original, so the run's name does not tell whose log a directory holds. The fence
does: it is the record of the incarnation that took the copy last, and the object tier that this one was taken from holds the same bytes.
"""

from __future__ import annotations

import time

from adacheck.backends.base import Backend
from adacheck.backends.errors import NotFound
from adacheck.config import StoreConfig
from adacheck.errors import DamagedCut, ForeignRun
from adacheck.incarnations import is_made_anew, read_incarnation
from adacheck.manifests import keys
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Incarnation
from adacheck.sense import read


def check_lineage(config: StoreConfig, objects: Backend, nvme: Backend) -> Incarnation | None:
    """The incarnation that took the copy last; `None` if its fence does not say. Writes nothing.

    Raises:
        ForeignRun: the object tier has another incarnation of that number, or none: says what to do in either case.
    """
    try:
        fence = read(nvme.get(keys.FENCE), Incarnation)
    except (NotFound, FormatError):
        return None
    try:
        taken = read_incarnation(objects, fence.run, fence.incarnation)
    except DamagedCut:
        return fence  # one flipped bit is no other history
    log = f"the log in {nvme.name} was last taken by {who(fence)}"
    own = "give this one another nvme=DIR, where it begins from its own newest full checkpoint"
    if taken is None:
        raise ForeignRun(
            f"{log}, of which {config.address} knows nothing. Either a copy of this object tier, or the one it is a copy of, trains with "
            f"that directory: {own}. Or this object tier was put back from an older copy: adacheck-fsck '{config.uri}' --repair makes it "
            "know what the log says, and a start goes on from the log; another nvme=DIR leaves the log behind. Nothing was changed"
        )
    if is_other(fence, taken):
        raise ForeignRun(
            f"{log}, but in {config.address} that is {who(taken)}: one is a copy of the other, and they went on apart; {own}. "
            "Nothing was changed"
        )
    return fence


def is_other(fence: Incarnation, taken: Incarnation) -> bool:
    """Whether an object tier's record of an incarnation shows that a fence of that number is of another history."""
    return taken != fence and not is_made_anew(taken)


def who(incarnation: Incarnation) -> str:
    """An incarnation for people."""
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(incarnation.started_unix_s))
    return f"incarnation {incarnation.incarnation} (started {begun} UTC on {incarnation.host}, pid {incarnation.pid})"

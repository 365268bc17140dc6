"""What is left to do for a copy on NVMe with damage that nothing can mend: back to its newest good cut, or out of the way as a whole.

The cut is the one that a restore would find there, by the functions of a restore.
"""

from __future__ import annotations

from dataclasses import replace

from adacheck.check_cut import newest_cut
from adacheck.errors import AdacheckError
from adacheck.finding import Tier
from adacheck.keeper.protocol import Kind
from adacheck.manifests import keys
from adacheck.manifests.errors import FormatError
from adacheck.repair_case import Case

K = keys.Kind


def truncate_copy(case: Case) -> None:
    """Set aside what lies above the newest cut that this copy can restore, and the damaged objects which that cut does not need.

    Without such a cut everything is set aside: then a start makes a new copy from the newest full checkpoint.
    """
    damaged = dict(case.damaged(Tier.NVME))
    if not damaged or case.nvme is None:
        return
    if all(name.kind is K.HISTORY for name in damaged.values()):
        case.move(Tier.NVME, damaged, "some steps are missing in reports")
        return
    bad = {finding.name for finding in case.damage}
    try:
        sources = case.check.gathered(case.run, case.nvme)
        cut = newest_cut(replace(sources, fulls=()), bad)
    except (AdacheckError, FormatError):
        cut = None
    if cut is None or cut.tier != str(Kind.NVME) or sources.scan is None:
        _set_all_aside(case)
        return
    generation = sources.scan.chain.generation
    names = [(key, keys.parse(key)) for key in case.nvme.list(keys.increments_prefix(generation))]
    above = [key for key, name in names if name is not None and name.step > cut.step]
    case.move(Tier.NVME, sorted(above, reverse=True), f"given up, above step {cut.step}, the newest good cut", given_up=True)
    staged = {name.step for name in damaged.values() if name.kind in (K.STAGED, K.STAGED_SLOT)}
    for step in staged:
        case.move(Tier.NVME, list(case.nvme.list(keys.staged_prefix(generation, step))), "staged for a full checkpoint that never came")
    left = [key for key, name in damaged.items() if name.kind is K.INCREMENT_SLOT and name.step <= cut.step]
    case.move(Tier.NVME, left, f"the cut of step {cut.step} does not need it")


def _set_all_aside(case: Case) -> None:
    """The head record goes last: until then the next repair goes on where this one stopped."""
    assert case.nvme is not None
    names = [key for key in case.nvme.list("") if keys.parse_quarantined(key) is None and key not in (keys.CHAIN, keys.FENCE)]
    case.move(Tier.NVME, names, "given up: no cut can be restored from this copy", given_up=True)
    case.move(Tier.NVME, [keys.CHAIN], "given up: no cut can be restored from this copy", given_up=True)

"""What findings say of the rest of the store: what a restore takes instead, and what remains where. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from adacheck.check_cut import NewestCut
from adacheck.config import StoreConfig
from adacheck.finding import Finding, Kind, Severity, Tier, note

BY_NEWEST_CUT = "by the newest cut"
"""In place of a remedy that only the newest cut can tell."""


def advised(finding: Finding, newest: NewestCut | None) -> Finding:
    """The finding with its remedy, if that was left to the newest cut: a restart begins from the same one as a restore."""
    if finding.severity is not Severity.DAMAGE or finding.remedy != BY_NEWEST_CUT:
        return finding
    if newest is None:
        return replace(finding, remedy="put the object back from a copy; nothing can be restored without it")
    goes_on = f"a restore takes step {newest.step} from {newest.source}, which does not need it, and a restart goes on from there"
    return replace(finding, remedy=f"{goes_on}; --repair mends it, or sets it aside")


def no_full(newest: NewestCut) -> Finding:
    """The newest cut is on NVMe, and the object tier holds no full checkpoint."""
    found = f"none now; only NVMe of this host can restore, step {newest.step}"
    remedy = "start the run: it publishes one; if this host is lost before that, nothing can be restored"
    said = note(Kind.NO_FULL, Tier.OBJECT, "full/", "a full checkpoint, restorable on any host", found, remedy)
    return replace(said, lost="nothing while NVMe of this host lasts")


def unlisted(folder: str, *, earlier: bool) -> Finding:
    """A folder of a full checkpoint that the newest version does not list; `earlier`: an earlier version does."""
    expected = "a version that lists it"
    if earlier:
        why = "nothing: it was dropped, or a repair gave it up; --gc, or a later full checkpoint, removes it"
        said = note(Kind.UNLISTED, Tier.OBJECT, folder, expected, "only earlier versions do", why)
        return replace(said, lost="this full checkpoint, when it was dropped or given up; nothing more")
    why = "nothing: it is being written, or was left by a process that was killed; a later full checkpoint removes it"
    return note(Kind.UNLISTED, Tier.OBJECT, folder, expected, "none does", why)


def overlooked_full(folder: str) -> Finding:
    """A folder that no version lists, and that one may have listed which is gone without a trace (`unlisted.overlooked`)."""
    expected, found = "a version that lists it", "none does, and all that are listed are older"
    why = "run --repair before the run starts again: it lists it again if it is whole"
    return Finding(Severity.DAMAGE, Kind.UNLISTED, Tier.OBJECT, folder, expected, found, "this full checkpoint, for every restore", why)


def strangers(config: StoreConfig, run: str | None, names: Iterable[str]) -> Iterator[Finding]:
    """Names that this project does not give, in the object tier; what lies there as a log of this run would is not called a stranger's."""
    logs: set[str] = set()
    for name in names:
        folder = name.rpartition("/")[0]
        above, _, _ = f"/{folder}".rpartition(f"/{run}/")
        if config.scheme == "file" and f"/{run}/" in f"/{folder}" and name.endswith(".mdb"):
            if folder not in logs:
                uri = replace(config, nvme=f"{config.address.removeprefix('file://')}{above}").uri
                what = "what looks like the log of this run on NVMe, of which another directory was given"
                remedy = f"leave it there: adacheck-fsck '{uri}' checks it"
                yield note(Kind.ORPHAN, Tier.OBJECT, folder, "a log in the directory that nvme= gives", what, remedy)
            logs.add(folder)
            continue
        yield note(Kind.ORPHAN, Tier.OBJECT, name, "only names of this project", "another name", "move it away if it is not yours")

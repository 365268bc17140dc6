"""Publishes a version that lists what is whole: without broken full checkpoints, and with those that only a lost version listed.

Versions are immutable, so a list is corrected by the next one. It is published for the newest incarnation, by the same exclusive put
that incarnation itself uses: a trainer that is running elsewhere loses a number, reads the list again, and goes on. No new
incarnation is taken, which would stop it.
"""

from __future__ import annotations

import platform

from adacheck.catalogue import Fulls, in_order, publish
from adacheck.check_full import check_contents, check_manifest
from adacheck.check_records import Look, Sample
from adacheck.digest import digest
from adacheck.finding import Kind, Tier
from adacheck.incarnations import newest_incarnation
from adacheck.keeper.cut import void_fork
from adacheck.manifests import keys
from adacheck.manifests.encoding import encode
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Fork, Full, FullEntry
from adacheck.repair_case import Action, Case
from adacheck.sense import read
from adacheck.unlisted import overlooked

K = keys.Kind


def publish_what_is_whole(case: Case) -> None:
    """A new version, and after it the records that it stands in for are set aside."""
    for key, _ in case.damaged(Tier.OBJECT, K.HISTORY_COPY):
        case.move(Tier.OBJECT, [key], "some steps are missing in reports of other hosts")
    broken = {key.rpartition("/")[0] for key, _ in case.damaged(Tier.OBJECT, K.MANIFEST, K.SHARD, K.OPAQUE)}
    damaged = sorted(key for key, _ in case.damaged(Tier.OBJECT, K.VERSION))
    found, torn = _overlooked(case) if _head_is_lost(case, damaged) else ([], set())
    number = newest_incarnation(case.objects)
    if not (broken or damaged or found or torn) or not _may_publish(case, number):
        return
    lost = {entry.folder for entry in found}

    def change(fulls: Fulls) -> Fulls:
        kept = [full for full in fulls if full.folder not in broken | lost]
        return in_order([*kept, *found])

    version = publish(case.objects, case.run, number, change, anew=True)
    listed = f"lists {len(version.fulls)} full checkpoints"
    without = f", without {', '.join(sorted(broken))}" if broken else ""
    again = f", and again {', '.join(sorted(lost))}" if lost else ""
    case.actions.append(Action(Tier.OBJECT, keys.version(number, version.number), f"published: {listed}{without}{again}"))
    case.actions += [_given_up(full) for full in case.check.top.fulls if full.folder in broken]
    manifests = [keys.manifest(folder) for folder in sorted(broken | torn)]
    case.move(
        Tier.OBJECT, [key for key in manifests if case.content(Tier.OBJECT, key) is not None], "of a full checkpoint that is not whole"
    )
    if damaged:
        case.move(Tier.OBJECT, _superseded(case, damaged), "a version that cannot be read, or that one follows")


def _given_up(full: FullEntry) -> Action:
    what = f"the full checkpoint of step {full.step} is given up: it is damaged, and nothing in the store can mend it"
    remain = "its files stay there until --gc, or a later full checkpoint, removes them"
    return Action(Tier.OBJECT, full.folder, f"{what}; {remain}", given_up=True)


def _may_publish(case: Case, number: int) -> bool:
    """Whether the newest incarnation has started. One of this host that has not died before it did: its NVMe lock is free."""
    forks = case.check.top.forks
    if number in forks or number == 0:
        return number != 0
    taken = case.check.top.incarnations.get(number)
    if taken is None or taken.host != platform.node() or case.nvme is None:
        return False  # it may be starting elsewhere at this moment
    void = void_fork(number)
    case.objects.put(keys.fork(number), encode(Fork(case.run, number, void.cut, void.proven)), exclusive=True)
    case.actions.append(Action(Tier.OBJECT, keys.fork(number), f"written: incarnation {number} died before it started"))
    return True


def _superseded(case: Case, damaged: list[str]) -> list[str]:
    """What to set aside: a damaged version above all that can be read, by itself; one below, with all before it, to which nothing links."""
    names = [key for key in case.check.top.names if (name := keys.parse(key)) is not None and name.kind is K.VERSION]
    readable = case.check.top.head
    below = [key for key in damaged if key < readable]
    last = max(below, default="")
    if below and not any(key <= last for key in names):
        last = min(names)  # what is missing was the first there was: then the next one, whose predecessor it is, goes
    return [key for key in names if key <= last or (key in damaged and key > readable)]


def _head_is_lost(case: Case, damaged: list[str]) -> bool:
    """Whether there was a later list than the newest that can be read: a damaged one, or one that is gone."""
    gone = any(finding.kind in (Kind.UNLISTED, Kind.NO_CUT) for finding in case.damage)
    return gone or bool(damaged and damaged[-1] > case.check.top.head)


def _overlooked(case: Case) -> tuple[list[FullEntry], set[str]]:
    """The full checkpoints that a lost version listed: those whose every byte is right, and the folders of the others."""
    top, found, torn = case.check.top, list[FullEntry](), set[str]()
    for key in top.names:
        name, folder = keys.parse(key), key.rpartition("/")[0]
        if name is None or name.kind is not K.MANIFEST or not overlooked(case.objects, case.run, folder, top.fulls, top.forks.values()):
            continue
        entry = _entry_of(case, key, name)
        if entry is not None and _is_whole(case, entry):
            found.append(entry)
        elif entry is not None:
            torn.add(folder)
    return found, torn


def _entry_of(case: Case, key: str, name: keys.Name) -> FullEntry | None:
    content = case.content(Tier.OBJECT, key) or b""
    try:
        manifest = read(content, Full)
    except FormatError:
        return None
    if manifest.run != case.run:
        return None
    size_bytes = sum(shard.size_bytes for shard in manifest.shards) + len(content)
    size_bytes += max((item.stop for item in manifest.opaque), default=0) + sum(held.stored_bytes for held in manifest.history)
    folder = key.rpartition("/")[0]
    return FullEntry(name.incarnation, name.step, folder, digest(content), size_bytes, "pending", True)


def _is_whole(case: Case, entry: FullEntry) -> bool:
    look = Look(case.objects, Tier.OBJECT, Sample(1.0))
    manifest = check_manifest(look, entry, case.run, {})
    if manifest is not None:
        check_contents(look, entry, {entry.folder: manifest})
    return not look.findings

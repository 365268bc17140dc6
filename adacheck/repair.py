"""Repairs a store: good bytes over bad ones where there are any, else back to the newest good cut. Without torch.

Each round checks the whole store, and carries out the first stage that can do something; the stages go from what loses nothing to
what gives something up. A repair that is killed is begun again: every change is one that the store may be left with.

NVMe is locked, so a trainer of this host keeps a repair out. One of another host has a copy of its own, and in the object tier it is
not disturbed: what is put there is what was there before, or cuts off less than the forks did, or is a version more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from adacheck.backends.base import Backend
from adacheck.backends.errors import Busy
from adacheck.backends.lmdb_directory import DATA_FILE
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.check import Check
from adacheck.check_cut import NewestCut
from adacheck.check_records import Sample
from adacheck.config import StoreConfig
from adacheck.errors import StoreBusy
from adacheck.finding import Finding, Kind, Severity, Tier
from adacheck.nvme_directory import nvme_path, open_copy
from adacheck.repair_bytes import put_good_bytes
from adacheck.repair_case import Action, Case
from adacheck.repair_copy import truncate_copy
from adacheck.repair_records import rebuild_bases, rebuild_chain, rebuild_fence, rebuild_forks, rebuild_identity
from adacheck.repair_versions import publish_what_is_whole

Stage = Callable[[Case], None]
STAGES: tuple[Stage, ...] = (
    put_good_bytes,
    rebuild_identity,
    rebuild_forks,
    rebuild_fence,
    rebuild_chain,
    rebuild_bases,
    publish_what_is_whole,
    truncate_copy,
)
"""In this order: what comes later relies on what comes before, and gives up more."""

ROUNDS_MAX = 12


@dataclass
class Repaired:
    """What a repair found and did.

    Attributes:
        found: by the first check. left: by the last one, notes included.
        actions: in order.
        newest: the cut that a restore returns now.
        objects, read_bytes: how much the last check looked at.
    """

    found: list[Finding] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    run: str | None = None
    newest: NewestCut | None = None
    objects: int = 0
    read_bytes: int = 0

    @property
    def damage_left(self) -> bool:
        """Whether anything is damaged still."""
        return any(finding.severity is Severity.DAMAGE for finding in self.left)


def repair(config: StoreConfig, objects: Backend, sample: Sample, *, say: Callable[[Action], None] = lambda _: None) -> Repaired:
    """Repair a store.

    Args:
        objects: the object tier, for writing.
        sample: whose bytes are read; what is not read is taken to be good.
        say: told of every action when it is done.

    Raises:
        NoCut: there is no store at the address.
        StoreBusy: a trainer of this host is running; names its pid.
        BackendError: a tier does not answer, or refuses.
    """
    done = _repair_once(config, objects, sample, say)
    if config.aside or not any(finding.tier is Tier.NVME and finding.kind is Kind.UNREADABLE for finding in done.left):
        return done
    # A bad page may come to light only when something is written: then the file as a whole is moved out of the way.
    again = _repair_once(config, objects, sample, say)
    return replace(again, found=[*done.found, *again.found], actions=[*done.actions, *again.actions])


def _repair_once(config: StoreConfig, objects: Backend, sample: Sample, say: Callable[[Action], None]) -> Repaired:
    with ExitStack() as stack:
        nvme, moved, found = _open_nvme(config, objects, stack)
        for action in moved:
            say(action)
        done = repair_opened(config, objects, nvme, sample, say=say)
        done.actions[:0], done.found = moved, [*found, *done.found]
        return done


def repair_opened(
    config: StoreConfig,
    objects: Backend,
    nvme: Backend | None,
    sample: Sample,
    *,
    say: Callable[[Action], None] = lambda _: None,
    now_unix_s: float | None = None,
) -> Repaired:
    """As `repair`, with the copy on NVMe opened and locked by the caller."""
    done, now = Repaired(), int(time.time() if now_unix_s is None else now_unix_s)
    for turn in range(ROUNDS_MAX):
        check = Check(config, objects, sample, nvme=nvme)
        done.left = list(check.findings())
        if turn == 0:
            done.found = done.left
        done.run, done.newest, done.objects, done.read_bytes = check.run, check.newest, check.objects, check.read_bytes
        if not done.damage_left or check.run is None:
            break
        case = Case(objects, nvme, check, [f for f in done.left if f.severity is Severity.DAMAGE], now)
        for stage in STAGES:
            stage(case)
            if case.actions:
                break
        for action in case.actions:
            say(action)
        done.actions += case.actions
        if not case.actions:
            break
    return done


def _open_nvme(config: StoreConfig, objects: Backend, stack: ExitStack) -> tuple[Backend | None, list[Action], list[Finding]]:
    """The copy of this host, locked, `None` where there is none; what had to be moved out of its way, and the findings that said so."""
    first = Check(config, objects, Sample())
    found = [finding for finding in first.findings() if finding.kind in (Kind.UNREADABLE, Kind.MISSING, Kind.TRUNCATED, Kind.ZERO_LENGTH)]
    path = nvme_path(config, first.run or "")
    if first.run is None or path is None or not path.parent.is_dir() or first.other_history:
        return None, [], []
    file = path / DATA_FILE
    absent = not file.is_file()
    try:
        nvme, aside = (LmdbBackend(path, create=False), None) if config.aside else open_copy(path)
    except Busy as error:
        raise StoreBusy(f"run {first.run} is in use on this host by {error.holder}; repair it when that has ended") from error
    stack.enter_context(nvme)
    what = f"given up: {aside}" if aside is not None else f"{file} was gone: an empty copy was made" if absent else None
    if what is None:
        return nvme, [], []
    return (
        nvme,
        [Action(Tier.NVME, str(path), what, given_up=aside is not None)],
        [finding for finding in found if finding.name == str(file)],
    )

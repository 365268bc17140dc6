"""Everything a report says, gathered from a store into one frozen value. Only reads, also beside a running trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest

from adacheck.backends.base import Backend
from adacheck.backends.errors import BackendError, NotFound
from adacheck.check import Check
from adacheck.check_cut import NewestCut
from adacheck.check_records import Sample
from adacheck.config import StoreConfig
from adacheck.errors import AdacheckError, DamagedCut, NoCut
from adacheck.finding import Finding
from adacheck.history import Row
from adacheck.history_sources import read_rows
from adacheck.keeper.cut import ForkEntry, is_live
from adacheck.keeper.protocol import Kind
from adacheck.manifests import keys
from adacheck.manifests.encoding import decode
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Fork, FullEntry, Incarnation
from adacheck.reading import open_objects, open_sources
from adacheck.sources import Sources


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A row of the history, with whose it is and what became of it.

    Attributes:
        live: a restore counts it; else a later incarnation started from an earlier cut, and the step was done again.
        blocked_ms: what it cost the trainer, `None` where nothing came after it that could tell.
    """

    incarnation: int
    row: Row
    live: bool
    blocked_ms: float | None


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run.

    Attributes:
        steps: in the order in which they were logged.
        nvme_steps: those that this host's NVMe copy can restore.
        fulls: the full checkpoints on the live lineage, oldest first.
        newest: what a restore would return now.
        unread: one line for each thing that could not be read at all.
    """

    run: str
    address: str
    made_unix_s: float
    steps: tuple[LoggedStep, ...] = ()
    incarnations: tuple[Incarnation, ...] = ()
    forks: tuple[Fork, ...] = ()
    nvme_steps: tuple[int, ...] = ()
    fulls: tuple[FullEntry, ...] = ()
    findings: tuple[Finding, ...] = ()
    newest: NewestCut | None = None
    unread: tuple[str, ...] = ()

    @property
    def live(self) -> tuple[LoggedStep, ...]:
        """The steps that a restore counts, in order."""
        return tuple(step for step in self.steps if step.live)


def gather_facts(config: StoreConfig) -> Facts:
    """Read all of it, and run the read-only check. What cannot be read is a line of `Facts.unread`.

    Raises:
        NoCut: there is no run at the address.
        ForeignRun: the NVMe directory belongs to another run.
        BackendError: the object tier does not answer.
    """
    with open_objects(config) as objects:
        facts = Facts("unknown", config.address, time.time())
        try:
            with open_sources(config, objects) as sources:
                if sources is None:
                    raise NoCut(f"there is no run at {config.address}; check the address")
                facts = _records(facts, sources)
        except DamagedCut as error:
            facts = replace(facts, unread=(str(error),))
        return _checked(facts, Check(config, objects, Sample()))


def _records(facts: Facts, sources: Sources) -> Facts:
    on_nvme = [step for offer in sources.offers() if offer.kind is Kind.NVME for step in offer.steps]
    return replace(
        facts,
        run=sources.run,
        steps=tuple(logged_steps(read_rows(sources), sources.fork_table)),
        incarnations=_incarnations(sources.objects),
        forks=sources.forks,
        nvme_steps=tuple(on_nvme),
        fulls=sources.fulls,
        unread=tuple(sources.rejected),
    )


def logged_steps(rows: Sequence[tuple[int, Row]], forks: Sequence[ForkEntry]) -> Iterator[LoggedStep]:
    """Rows in the order of logging, with what the fork table and the row after each say of it."""
    for (incarnation, row), after in zip_longest(rows, rows[1:]):
        next_one = after is not None and after[0] == incarnation and after[1].step == row.step + 1
        blocked_ms = after[1].blocked_us / 1e3 if after is not None and next_one else None
        yield LoggedStep(incarnation, row, is_live(forks, incarnation, row.step), blocked_ms)


def _incarnations(objects: Backend) -> tuple[Incarnation, ...]:
    """Those that can be read; the check says which cannot."""
    found = []
    for key in objects.list(keys.INCARNATIONS_PREFIX):
        with suppress(FormatError, NotFound):
            found.append(decode(objects.get(key), Incarnation))
    return tuple(found)


def _checked(facts: Facts, check: Check) -> Facts:
    findings: list[Finding] = []
    try:
        findings.extend(check.findings())
    except (AdacheckError, BackendError, FormatError) as error:
        facts = replace(facts, unread=(*facts.unread, f"the check came to no end: {error}"))
    return replace(facts, findings=tuple(findings), newest=check.newest)

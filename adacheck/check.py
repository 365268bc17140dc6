"""Checks a whole store, read-only and beside a running trainer, and yields a `Finding` for each thing that is wrong. Without torch.

Order: the object tier (records, full checkpoints, what nobody names), then NVMe; at last which cut a restore would return, given all
that was found, and for it the findings on NVMe wait: what to do about them follows from that cut.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from adacheck.backends.base import Backend
from adacheck.backends.errors import Damaged, Denied, NotFound
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.os_errors import translated
from adacheck.check_advice import BY_NEWEST_CUT, advised, no_full, overlooked_full, strangers, unlisted
from adacheck.check_cut import NewestCut, newest_cut
from adacheck.check_full import check_contents, check_manifest
from adacheck.check_nvme import CopyRecords, check_records, check_slots, note_unreferenced
from adacheck.check_object_tier import TopRecords, check_complete, check_top
from adacheck.check_records import Consequence, Look, Sample, note_set_aside, persistent
from adacheck.config import StoreConfig
from adacheck.errors import AdacheckError, NoCut
from adacheck.finding import Finding, Kind, Severity, Tier, note
from adacheck.keeper.cut import NO_LIMIT, ForkEntry
from adacheck.lineage import is_other, who
from adacheck.manifests import keys
from adacheck.manifests.errors import FormatError
from adacheck.manifests.record import Full, Incarnation
from adacheck.nvme_directory import no_aside, nvme_path, set_aside
from adacheck.sense import read
from adacheck.set_aside import look_aside
from adacheck.sources import Sources, gather, moment_of, set_aside_by
from adacheck.unlisted import overlooked

STALE_S = 3600.0
"""An upload untouched for so long belongs to a process that was killed."""

_COPY = Consequence("every cut of this NVMe copy", BY_NEWEST_CUT)
_OTHER_HISTORY = Consequence(
    "nothing of this run: its object tier and the one that this log belongs to are copies that went on apart",
    "give this one another nvme=DIR; it begins there from its own newest full checkpoint",
)
_NO_CUT = Consequence("everything", "put damaged objects back from a copy of the store; what is named above says which")


class Check:
    """One check of one store.

    Args:
        objects: the object tier, only read from.
        nvme: the copy on NVMe, where the caller has it open already.
        now_unix_s: to tell old uploads from those under way.

    Attributes:
        other_history: whether the copy on NVMe belongs to another copy of this object tier.
        run, newest: known once all findings were taken; so are `top`, `copy` and `manifests`, all that was readable.
        objects, read_bytes: how much was looked at.
    """

    def __init__(
        self,
        config: StoreConfig,
        objects: Backend,
        sample: Sample,
        *,
        nvme: Backend | None = None,
        now_unix_s: float | None = None,
    ) -> None:
        self._config, self._backend, self._sample, self._nvme = config, objects, sample, nvme
        self._now_unix_s = time.time() if now_unix_s is None else now_unix_s
        self._bad: set[str] = set()
        self._unseen: Denied | None = None
        self.other_history = False
        self.run: str | None = None
        self.newest: NewestCut | None = None
        self.top, self.copy = TopRecords(), CopyRecords()
        self.manifests: dict[str, Full] = {}
        self.objects = self.read_bytes = 0

    def findings(self) -> Iterator[Finding]:
        """Everything that is wrong, as it is found.

        Raises:
            NoCut: there is no store at the address at all.
            BackendError: a tier does not answer.
            Denied: the copy on NVMe cannot be looked at by this user; all findings elsewhere came before.
        """
        for finding in self._findings():
            if finding.severity is Severity.DAMAGE:
                self._bad.add(finding.name)
            yield finding
        if self._unseen is not None:
            raise self._unseen

    def _findings(self) -> Iterator[Finding]:
        look = self._look()
        top = check_top(look, self._hidden())
        if not top.names:
            raise NoCut(f"there is no run at {self._config.address}; check the address")
        self.run = top.run
        with ExitStack() as stack:
            nvme, found = (self._nvme, []) if self._nvme is not None else self._nvme_seen(top.run)
            if nvme is not None and self._nvme is None:
                stack.enter_context(nvme)
            if nvme is not None and (other := self._of_other_history(nvme, top)) is not None:
                nvme, found = None, [other]
            copy, copy_found = self._copy_records(nvme, top)
            top, top_found = self._complete(look, top, copy)
            self.top, self.copy = top, copy
            yield from top_found
            yield from self._fulls(top)
            yield from self._leftovers(top)
            held = [*found, *copy_found, *(self._slots(nvme, copy) if nvme is not None else ())]
            self._bad |= {finding.name for finding in held if finding.severity is Severity.DAMAGE}
            no_cut = self._no_cut(top, nvme)
            yield from (advised(finding, self.newest) for finding in held)
            yield from no_cut
            if self.newest is not None and self.newest.tier == Tier.NVME and not top.fulls:
                yield no_full(self.newest)

    def gathered(self, run: str, nvme: Backend | None) -> Sources:
        """What the store offers. Raises as `sources.gather`."""
        return gather(run, self._backend, nvme, aside=bool(self._config.aside))

    def _look(self, backend: Backend | None = None) -> Look:
        return Look(backend or self._backend, Tier.OBJECT if backend is None else Tier.NVME, self._sample)

    def _taken(self, look: Look) -> list[Finding]:
        self.objects += look.objects
        self.read_bytes += look.read_bytes
        return look.findings

    def _hidden(self) -> str | None:
        """The NVMe directory where it lies inside the object tier's."""
        if self._config.nvme is None or self._config.scheme != "file":
            return None
        root, nvme = Path(self._config.address.removeprefix("file://")), Path(self._config.nvme)
        return f"{nvme.relative_to(root).as_posix()}/" if nvme.is_relative_to(root) else None

    def _complete(self, look: Look, top: TopRecords, copy: CopyRecords) -> tuple[TopRecords, list[Finding]]:
        """The top of the object tier, looked at a second time before anything is called damaged."""
        fence = 0 if copy.fence is None else copy.fence.incarnation
        check_complete(look, top, copy.incarnations(), fence)
        first = self._taken(look)
        if not first:
            return top, first
        again = self._look()
        top = check_top(again, self._hidden())
        check_complete(again, top, copy.incarnations(), fence)
        return top, persistent(first, again.findings)

    # NVMe

    def _nvme_seen(self, run: str | None) -> tuple[Backend | None, list[Finding]]:
        """As `_open_nvme`; what this user may not look at is told at the end, not taken for damage."""
        try:
            with translated(f"look at {self._config.nvme}"):
                return self._open_nvme(run)
        except Denied as error:
            wayout = "run it as the user who trains, or with nvme=none to check the object tier alone"
            self._unseen = Denied(f"the NVMe copy was not checked, all else was: {error}; {wayout}")
            return None, []

    def _open_nvme(self, run: str | None) -> tuple[Backend | None, list[Finding]]:
        """The copy on this host; else a finding that says why there is none."""
        path = nvme_path(self._config, run or "")
        if path is None or run is None or self._config.nvme is None:
            return None, []
        folder = Path(self._config.nvme)
        if self._config.aside and not path.is_dir():
            raise no_aside(self._config, run)
        if not path.parent.is_dir():
            others = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
            if others:
                remedy = Consequence(
                    "nothing of this run; it cannot be opened with this directory", "give each run an NVMe directory of its own"
                )
                return None, [self._file_finding(Kind.SPLICED, folder, f"run {run}", f"run {others[0]}", remedy)]
            return None, [
                note(Kind.NO_COPY, Tier.NVME, str(path), "a copy of the chain", "no directory", "look on the host that trained last")
            ]
        file, expected = path / "data.mdb", "an LMDB file"
        if not file.is_file():
            return None, [self._file_finding(Kind.MISSING, file, expected, "no file", _COPY)]
        try:
            return LmdbBackend(path, create=False, read_only=True), []
        except Damaged as error:
            cut = "cut short" in str(error) or "ends within" in str(error)
            kind = Kind.ZERO_LENGTH if file.stat().st_size == 0 else Kind.TRUNCATED if cut else Kind.UNREADABLE
            return None, [self._file_finding(kind, file, expected, str(error), _COPY)]

    def _of_other_history(self, nvme: Backend, top: TopRecords) -> Finding | None:
        """What a start refuses: a copy that belongs to another copy of this object tier. Nothing in it is looked at, or repaired."""
        try:
            fence = read(nvme.get(keys.FENCE), Incarnation)
        except (NotFound, FormatError, Damaged):
            return None  # it is said when the copy is checked
        taken = top.incarnations.get(fence.incarnation)
        self.other_history = taken is not None and fence.run == top.run and is_other(fence, taken)
        if taken is None or not self.other_history:
            return None
        path = Path(nvme.name.removeprefix("lmdb:"))
        return self._file_finding(Kind.SPLICED, path, f"a log last taken by {who(taken)}", f"one of {who(fence)}", _OTHER_HISTORY)

    @staticmethod
    def _file_finding(kind: Kind, name: Path, expected: str, found: str, consequence: Consequence) -> Finding:
        return Finding(Severity.DAMAGE, kind, Tier.NVME, str(name), expected, found, consequence.lost, consequence.remedy)

    def _copy_records(self, nvme: Backend | None, top: TopRecords) -> tuple[CopyRecords, list[Finding]]:
        if nvme is None or top.run is None:
            return CopyRecords(), []
        until = set_aside_by(nvme) if self._config.aside else NO_LIMIT
        forks = [ForkEntry(fork.incarnation, fork.cut, fork.proven) for fork in top.forks.values() if fork.incarnation < until]
        try:
            with moment_of(nvme) as moment:
                look = self._look(moment)
                return check_records(look, top.run, forks), self._taken(look)
        except Damaged as error:
            return CopyRecords(), [self._unreadable(nvme, error)]

    def _unreadable(self, nvme: Backend, error: Damaged) -> Finding:
        return self._file_finding(Kind.UNREADABLE, Path(nvme.name.removeprefix("lmdb:")) / "data.mdb", "an LMDB file", str(error), _COPY)

    def _slots(self, nvme: Backend, copy: CopyRecords) -> list[Finding]:
        look = self._look(nvme)
        look.excuse(copy.aside)
        try:
            check_slots(look, copy)
            note_unreferenced(look, copy)
        except Damaged as error:
            look.findings.append(self._unreadable(nvme, error))
        return self._taken(look)

    # The object tier

    def _fulls(self, top: TopRecords) -> list[Finding]:
        """The listed full checkpoints; what the running trainer has dropped meanwhile is not held against it."""
        look, manifests = self._look(), self.manifests
        look.excuse(top.aside)
        others = {full.manifest_digest: f"that of {full.folder}" for full in top.fulls}
        for entry in top.fulls:
            manifest = check_manifest(look, entry, top.run, others)
            if manifest is not None:
                manifests[entry.folder] = manifest
        for entry in top.fulls:
            if entry.folder in manifests:
                check_contents(look, entry, manifests)
        named = {f"{folder}/{shard.name}" for folder, manifest in manifests.items() for shard in manifest.shards}
        for key in top.names:
            name = keys.parse(key)
            if name is not None and name.kind is keys.Kind.SHARD and key.rpartition("/")[0] in manifests and key not in named:
                expected = "only the shards of its manifest"
                look.findings.append(note(Kind.ORPHAN, look.tier, key, expected, "another shard", "move it away"))
        found = self._taken(look)
        if found:
            listed = {full.folder for full in check_top(self._look(), self._hidden()).fulls}
            found = [finding for finding in found if finding.name.rpartition("/")[0] in listed]
        return found

    def _leftovers(self, top: TopRecords) -> Iterator[Finding]:
        """What nobody names: strange names, what was set aside, folders without a version, uploads that were killed."""
        aside = self._look()
        note_set_aside(aside, top.strange)
        yield from aside.findings
        yield from self._moved_copies(top.run)
        yield from strangers(self._config, top.run, (name for name in top.strange if keys.parse_quarantined(name) is None))
        live = {full.folder for full in top.fulls}
        listed = {full.folder for version in top.versions[-1:] for full in version.fulls}
        folders = {key.rpartition("/")[0]: key for key in top.names if key.startswith(keys.FULL_PREFIX)}
        for folder, key in folders.items():
            if folder in listed - live:
                what = "a full checkpoint that a later start of the run left behind"
                yield note(
                    Kind.NOT_LIVE, Tier.OBJECT, folder, "cuts of the live lineage", what, "nothing; the next full checkpoint drops it"
                )
            elif folder not in listed and self._backend.stat(key) is not None:
                if self._overlooked(top, folder):
                    yield overlooked_full(folder)
                else:
                    yield unlisted(folder, earlier=any(folder == full.folder for version in top.versions for full in version.fulls))
        for upload in self._backend.uploads():
            if self._now_unix_s - upload.touched_unix_s >= STALE_S:
                what, remedy = f"untouched for {STALE_S:.0f} s", "nothing; --gc removes it when it is old"
                yield note(Kind.STALE_UPLOAD, Tier.OBJECT, upload.name, "no upload without a writer", what, remedy)

    def _overlooked(self, top: TopRecords, folder: str) -> bool:
        """Whether a version that is lost without a trace may have listed the folder, and nobody may be about to list it."""
        name, stat = keys.parse(keys.manifest(folder)), self._backend.stat(keys.manifest(folder))
        if top.run is None or name is None or stat is None:
            return False
        young = self._now_unix_s - stat.modified_unix_s < STALE_S
        explained = any(key.startswith(keys.VERSIONS_PREFIX) and key > top.head for key in top.names)  # by a damaged version
        if explained or (young and name.incarnation == max(top.incarnations, default=0)):
            return False
        return overlooked(self._backend, top.run, folder, top.fulls, top.forks.values())

    def _moved_copies(self, run: str | None) -> Iterator[Finding]:
        """Directories of NVMe copies that a start or a repair could not read and moved aside."""
        path = nvme_path(self._config, run or "")
        seen = path is not None and run is not None and self._unseen is None
        for moved in set_aside(path) if path is not None and seen else ():
            what, remedy = "a copy that could not be read, or not whole", look_aside(self._config, moved)
            yield note(Kind.SET_ASIDE, Tier.NVME, str(moved), "only the copy in use", what, remedy)

    def _no_cut(self, top: TopRecords, nvme: Backend | None) -> list[Finding]:
        """Find the newest cut, through the functions of a restore; having none is a finding, unless nothing was ever written."""
        why = "nothing reaches any step"
        if top.run is None or not top.run_intact:
            why = f"{keys.RUN} cannot be read"
        else:
            try:
                self.newest = newest_cut(self.gathered(top.run, nvme), self._bad)
            except (AdacheckError, FormatError, Damaged) as error:
                why = str(error)
        wrote = bool(self._bad) or any(key.startswith((keys.FULL_PREFIX, keys.VERSIONS_PREFIX)) for key in top.names)
        if self.newest is not None or not wrote:
            return []
        expected = "a cut that can be restored"
        return [Finding(Severity.DAMAGE, Kind.NO_CUT, Tier.OBJECT, self._config.address, expected, why, _NO_CUT.lost, _NO_CUT.remedy)]

"""Loads a cut into any topology through `torch.distributed.checkpoint` (DCP): resharding is DCP's job, exact bytes are ours.

Each rank looks at the store for itself, takes neither lock nor incarnation, and reads what it was asked for: of a full checkpoint
the 4 MiB segments that its rows lie in; of an NVMe copy the states that it holds a part of, each rebuilt whole, in batches of 64 MiB.
Every byte is verified before DCP gets it. What is no tensor DCP unpickles: bytes made here, a moment before, from verified msgpack.

The store is open while the metadata is read, and again from the rank's own planning to the end of its reading, both times as of one
moment: the log of a busy trainer has pruned the newest cut a step or two later. Where planning fails on the way DCP says nothing to a
reader, which would keep the trainer from using those pages again; so what is held is left after `HOLD_S` without a call.
"""

from __future__ import annotations

import io
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from adacheck.backends.base import Backend
from adacheck.config import StoreConfig
from adacheck.contents import Contents, Parts
from adacheck.errors import ConfigError, ForeignRun, NoCut, ReplayRefused, StateMismatch
from adacheck.full_reader import read_full
from adacheck.hold import Hold
from adacheck.keeper.cut import Offer
from adacheck.keeper.protocol import Kind
from adacheck.manifests.record import Fork
from adacheck.nvme_reader import NvmeReader
from adacheck.put_state import write_bytes
from adacheck.reading import open_sources
from adacheck.recovery import UNUSABLE, first_usable, no_cut, reject
from adacheck.sources import Sources

_log = logging.getLogger("adacheck")

HOLD_S = 60.0
"""How long the log's pages are kept for a rank that has planned and is not told to read: so long the trainer's log may grow."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """What a rank tells the coordinator: the cut it chose, every step it could read instead, and the lineage that these are of."""

    run: str
    step: int
    steps: frozenset[int]
    forks: tuple[Fork, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """The cut at `step` in one of its places; `offers` are those that are left, this one among them."""

    contents: Contents
    step: int
    offer: Offer
    offers: list[Offer]


class CutReader(StorageReader):
    """Made by `Store.reader`; for one `dcp.load` after another, on the thread that calls it.

    Between planning and reading it holds the log as it is, for `HOLD_S` seconds; later it looks whether the cut is still there.

    Attributes:
        step: the cut that was loaded last, or would be.

    Raises:
        NoCut: there is no such cut, or none at all; names the nearest.
    """

    def __init__(self, config: StoreConfig, objects: Backend, step: int | None) -> None:
        self._config, self._objects, self._asked = config, objects, step
        self._metadata: Metadata | None = None
        self._sources: Sources | None = None
        self._said: set[str] = set()
        self._hold = Hold()
        weakref.finalize(self, self._hold.leave)
        self.step = self._open(step).step  # now, since DCP buries what is raised inside it
        self._hold.leave()

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """As `StorageReader.reset`; a checkpoint id is refused, since the store and the step say which cut it is."""
        self._hold.leave()
        if checkpoint_id is not None:
            raise ConfigError(f"checkpoint_id={checkpoint_id!r} was given beside store.reader(), which knows its cut; leave it out")

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """As `StorageReader.read_metadata`: every key of the cut, which is chosen now."""
        source = self._open(self._asked)
        self.step, self._metadata = source.step, source.contents.metadata()
        self._hold.leave()
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """As `StorageReader.set_up_storage_reader`: nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As `StorageReader.prepare_local_plan`: says which cuts this rank reaches; from here on as of one moment."""
        chosen = self._open(self._asked, planned=True)
        assert self._sources is not None
        self._hold.lend(HOLD_S)
        steps = frozenset(step for offer in chosen.offers for step in offer.steps)
        return replace(plan, storage_data=_Reach(self._sources.run, chosen.step, steps, self._sources.forks))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As `StorageReader.prepare_global_plan`: the cut that all ranks chose, or the newest that all of them reach.

        Raises:
            NoCut: there is none; says what each rank reaches. Or the run was started again while the ranks looked, one after the other:
                a step may then be one cut to some of them, and another to the rest.
            ForeignRun: the ranks look at different runs.
        """
        try:
            step = agreed([plan.storage_data for plan in plans])
        except BaseException:
            self._hold.leave()  # the other ranks are told only by DCP's error
            raise
        return [replace(plan, storage_data=step) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As `StorageReader.read_data`, done when it returns. Tensors are written one by one, each whole verified.

        Raises:
            NoCut: the bytes of the cut are bad wherever it is; names the damaged objects, and the nearest other cut. Or planning took
                longer than `HOLD_S`, and the trainer went on from that cut meanwhile.
            StateMismatch: a tensor to load into has another dtype.
        """
        try:
            self._load(plan, planner)
        finally:
            self._hold.leave()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """As `StorageReader.validate_checkpoint_id`: no checkpoint id stands for a cut."""
        return False

    def _load(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        source = self._checked(self._choose(plan.storage_data)) if self._hold.resume() else self._again(plan.storage_data)
        self.step, left = source.step, dict(enumerate(plan.items))
        _log.info("loading step %d from %s", source.step, source.offer.source)
        while True:
            try:
                for at, content in _verified(source, left):
                    _give(planner, left.pop(at), content)
                return
            except _Bad as bad:
                assert self._sources is not None
                offers = reject(self._sources, source.offers, source.offer, source.step, bad.error)
                source = self._checked(self._choose(source.step, offers))

    def _again(self, step: int) -> _Source:
        """The cut at `step`, after what was held since planning has been left."""
        before = self._sources
        try:
            source = self._open(step, planned=True)
        except NoCut as error:
            raise NoCut(f"planning took longer than {HOLD_S:g} s, and the cut it was for is gone: {error}; load again") from error
        if before is not None and self._sources is not None and self._sources.forks != before.forks:
            raise NoCut(f"the trainer was restarted after step {step} was planned for, so that step may be another one now; load again")
        return source

    def _open(self, step: int | None, *, planned: bool = False) -> _Source:
        """Look at the store anew, and hold it as it is now. `planned`: the cut must hold what DCP has planned for."""
        self._sources = self._hold.enter(open_sources(self._config, self._objects))
        try:
            if self._sources is None:
                raise NoCut(f"there is no run at {self._config.address}; check the address")
            for line in (line for line in self._sources.rejected if line not in self._said):
                self._said.add(line)
                _log.warning("not looked at: %s", line)
            source = self._choose(step)
            return self._checked(source) if planned else source
        except BaseException:
            self._hold.leave()
            raise

    def _choose(self, step: int | None, offers: list[Offer] | None = None) -> _Source:
        """The newest cut, or the one at `step`, of the cheapest source that can be used."""
        sources = self._sources
        assert sources is not None
        offers = sources.offers() if offers is None else offers

        def use(offer: Offer, at: int) -> tuple[Contents, int]:
            return Contents(_parts(sources, offer, at)), at

        found = first_usable(sources, offers, use, step=step)
        if found is None:
            raise no_cut(sources, step, "a cut") if offers or step is not None else NoCut(f"run {sources.run} has no cut yet")
        (contents, at), offer, left = found
        return _Source(contents, at, offer, left)

    def _checked(self, source: _Source) -> _Source:
        """The same, if it holds what DCP has planned for."""
        if source.contents.metadata() != self._metadata:
            raise NoCut(f"the cut at step {source.step} has other tensors than that at step {self.step}, which was planned for; load again")
        return source


def agreed(reached: list[_Reach]) -> int:
    """The cut that every rank reads: theirs, if all chose the same, else the newest that all reach.

    Raises:
        NoCut, ForeignRun: as `CutReader.prepare_global_plan`.
    """
    runs = {reach.run for reach in reached}
    if len(runs) > 1:
        raise ForeignRun(f"the ranks look at different runs: {', '.join(sorted(runs))}; give all of them the same store")
    if len({reach.forks for reach in reached}) > 1:
        raise NoCut(
            "the trainer was restarted while the ranks looked at the store, so a step may not be the same cut to all of them; load again"
        )
    chosen = {reach.step for reach in reached}
    common = chosen if len(chosen) == 1 else frozenset.intersection(*(reach.steps for reach in reached))
    if not common:
        each = ", ".join(f"rank {rank} {max(reach.steps)}" for rank, reach in enumerate(reached))
        raise NoCut(f"no cut is reached by every rank; the newest of each: {each}; publish a full checkpoint, which all of them reach")
    return max(common)


class _Bad(Exception):
    """A source turned out to be bad; `error` says why. It never leaves this module."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _verified(source: _Source, items: dict[int, ReadItem]) -> Iterator[tuple[int, Any]]:
    """What a source gives; its errors are told apart from those of whoever takes it."""
    try:
        yield from source.contents.read(dict(items))
    except UNUSABLE as error:
        raise _Bad(error) from error


def _parts(sources: Sources, offer: Offer, step: int) -> Parts:
    if offer.kind is not Kind.NVME:
        return read_full(sources.objects, sources.full(offer))
    assert sources.nvme is not None and sources.scan is not None
    reader = NvmeReader(sources.nvme, sources.scan, step)
    refused = reader.refused()
    if refused is not None:
        raise ReplayRefused(f"gradients cannot be replayed here: {refused}")
    return reader


def _give(planner: LoadPlanner, item: ReadItem, content: Any) -> None:
    """Hand one item to DCP."""
    if item.type is LoadItemType.BYTE_IO:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        buffer.seek(0)
        planner.load_bytes(item, buffer)
        return
    target = planner.resolve_tensor(item).detach()
    if (target.dtype, target.shape) != (content.dtype, content.shape):
        key, wanted = item.dest_index.fqn, f"{target.dtype} {list(target.shape)}"
        raise StateMismatch(f"{key} is {content.dtype} {list(content.shape)} in the cut, {wanted} here; load as it is stored, then convert")
    write_bytes(target, content)
    planner.commit_tensor(item, target)

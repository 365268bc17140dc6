"""A small store in memory, one bit of which is flipped at a time, and what the trainer's live tensors were after every step.

Only the touched object is copied. What a restore gives is compared with digests that were taken from the live job with torch and
blake3 alone (`tests/golden/make_golden.py`), never with what the store says of itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from adacheck.backends.base import Backend
from adacheck.backends.errors import BackendError
from adacheck.backends.memory import MemoryBackend
from adacheck.check_records import Sample
from adacheck.config import StoreConfig, parse
from adacheck.digest import tensor_digest_of_bytes
from adacheck.errors import AdacheckError
from adacheck.finding import Tier
from adacheck.incarnations import read_run
from adacheck.manifests import keys
from adacheck.manifests.errors import FormatError
from adacheck.recovery import Cut, gather, read_newest
from adacheck.repair import Repaired, repair_opened
from adacheck.states import tensor_bytes
from adacheck.tiling import several_optimizers, tensor_key
from tests.damaged_store import STEPS, Copy, build

NOW_UNIX_S = 1_700_000_000


@dataclass(frozen=True)
class Content:
    """Every object of both tiers."""

    objects: Mapping[str, bytes]
    nvme: Mapping[str, bytes]

    def of(self, tier: Tier) -> Mapping[str, bytes]:
        return self.objects if tier is Tier.OBJECT else self.nvme

    def every(self) -> Iterator[tuple[Tier, str, bytes]]:
        yield from ((Tier.OBJECT, key, content) for key, content in self.objects.items())
        yield from ((Tier.NVME, key, content) for key, content in self.nvme.items())

    def with_object(self, tier: Tier, key: str, content: bytes | None) -> Content:
        """The same store with another object in one place, or with none."""
        changed = {name: held for name, held in self.of(tier).items() if name != key} | ({} if content is None else {key: content})
        return replace(self, objects=changed) if tier is Tier.OBJECT else replace(self, nvme=changed)

    def without_quarantine(self) -> Content:
        return Content(
            {key: content for key, content in self.objects.items() if not key.startswith(keys.QUARANTINE_PREFIX)},
            {key: content for key, content in self.nvme.items() if not key.startswith(keys.QUARANTINE_PREFIX)},
        )


def flip(content: bytes, bit: int) -> bytes:
    """One bit is another."""
    return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def loaded(content: Mapping[str, bytes]) -> MemoryBackend:
    """A backend that holds it."""
    backend = MemoryBackend()
    backend.put_many(content.items())
    return backend


def content_of(backend: Backend) -> dict[str, bytes]:
    """Every object of a backend."""
    return {key: backend.get(key) for key in backend.list("")}


@dataclass
class Small:
    """The store: full checkpoints at 4 and 8, two starts, increments with gradients to step 11, bases, and states staged for an upload."""

    root: Path
    seed: int = 1
    live: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.copy: Copy = build(self.root, self.seed, self.live)
        with self.copy.open(keys.Kind.CHAIN) as nvme, self.copy.open(keys.Kind.RUN) as objects:
            self.content = Content(content_of(objects), content_of(nvme))
        self.config: StoreConfig = parse(f"file://{self.root}/gone?nvme={self.root}/gone/nvme", {})
        newest = self.restored(self.content)
        assert newest is not None and newest.step == STEPS
        self.opaque = {newest.step: newest.opaque}
        for step in (4, 8):
            sources = gather(read_run(loaded(self.content.objects)).run, loaded(self.content.objects), None)  # type: ignore[union-attr]
            cut = read_newest(sources, step=step)
            assert cut is not None
            self.opaque[step] = cut.opaque

    def restored(self, content: Content) -> Cut | None:
        """What a restore returns, `None` where it raises one of this project's errors."""
        return restored(loaded(content.objects), loaded(content.nvme))

    def check_live(self, cut: Cut | None) -> None:
        """It is what the trainer had after that step, to the bit."""
        if cut is None:
            return
        several = several_optimizers([state.spec for state in cut.states.values()])
        found = {
            tensor_key(state.spec, name, several): tensor_digest_of_bytes(tensor_bytes(tensor)).hex()
            for state in cut.states.values()
            for name, tensor in state.tensors.items()
        }
        assert found == self.live[str(cut.step)], f"the cut of step {cut.step} from {cut.source} has wrong bytes"
        if cut.step in self.opaque:
            assert cut.opaque == self.opaque[cut.step], f"the cut of step {cut.step} from {cut.source} has wrong opaque items"

    def repaired(self, content: Content) -> tuple[Repaired, Content]:
        """What `adacheck-fsck --repair` finds and does, and what the store holds afterwards."""
        objects, nvme = loaded(content.objects), loaded(content.nvme)
        done = repair_opened(self.config, objects, nvme, Sample(1.0), now_unix_s=NOW_UNIX_S)
        return done, Content(content_of(objects), content_of(nvme))


def restored(objects: Backend, nvme: Backend | None) -> Cut | None:
    """What a restore returns, `None` where it raises one of this project's errors."""
    try:
        run = read_run(objects)
        return None if run is None else read_newest(gather(run.run, objects, nvme))
    except (AdacheckError, BackendError, FormatError):
        return None


def positions(content: Content, each: int, seed: int) -> Iterator[tuple[Tier, str, int]]:
    """For every object `each` of its bits (all, where it has fewer), by chance."""
    chance = random.Random(seed)
    for tier, key, held in content.every():
        bits = len(held) * 8
        yield from ((tier, key, bit) for bit in sorted(chance.sample(range(bits), min(each, bits))))

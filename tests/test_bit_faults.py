"""One bit of a store flipped, at more than two thousand places: it is named, never believed, and repaired.

Of every object of both tiers, and of the LMDB file itself. After the repair the newest cut is served that can be: all of them with the
bit turned back; without that art (for longer objects it is not tried) at least what a restore finds that has lost the object.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from adacheck import mend
from adacheck import repair as repair_module
from adacheck.backends.errors import BackendError
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.object_store import ObjectStore
from adacheck.check_records import Sample
from adacheck.config import parse
from adacheck.finding import Severity
from adacheck.manifests import keys
from adacheck.repair import Repaired, repair
from adacheck.repair_bytes import put_good_bytes
from adacheck.repair_case import Case
from tests.damaged_store import STEPS
from tests.flipped_store import Small, content_of, flip, loaded, positions, restored

EACH, EACH_WITHOUT_MENDING, RAW = 16, 3, 300
NEWEST_FULL, PARTS = 8, 8


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    logging.getLogger("adacheck").setLevel(logging.CRITICAL)
    yield Small(tmp_path_factory.mktemp("small"))
    logging.getLogger("adacheck").setLevel(logging.NOTSET)


def named(done: Repaired) -> set[str]:
    """What the check before the repair called damaged."""
    return {finding.name for finding in done.found if finding.severity is Severity.DAMAGE}


@pytest.mark.parametrize("part", range(PARTS))
def test_any_flipped_bit_is_named_never_believed_and_turned_back(small: Small, part: int) -> None:
    tried = 0
    for tier, key, bit in list(positions(small.content, EACH, seed=1))[part::PARTS]:
        damaged = small.content.with_object(tier, key, flip(small.content.of(tier)[key], bit))
        small.check_live(small.restored(damaged))
        done, after = small.repaired(damaged)
        assert key in named(done), f"bit {bit} of {key}: found {done.found}"
        assert not done.damage_left, f"bit {bit} of {key}: left {done.left}"
        assert done.actions and done.newest is not None and done.newest.step == STEPS
        assert after == small.content, f"bit {bit} of {key} is not turned back"
        tried += 1
    assert tried >= 1400 // PARTS, "objects were lost from the store that is swept"


def test_what_cannot_be_turned_back_costs_no_more_than_the_object(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mend, "MEND_BYTES_MAX", 0)
    for tier, key, bit in positions(small.content, EACH_WITHOUT_MENDING, seed=2):
        damaged = small.content.with_object(tier, key, flip(small.content.of(tier)[key], bit))
        without = small.restored(small.content.with_object(tier, key, None))
        done, after = small.repaired(damaged)
        assert key in named(done) and not done.damage_left, f"bit {bit} of {key}: left {done.left}"
        cut = small.restored(after)
        small.check_live(cut)
        assert cut is not None and done.newest is not None and cut.step == done.newest.step
        assert cut.step >= (NEWEST_FULL if without is None else without.step), f"bit {bit} of {key} costs more than {key}"
        again, _ = small.repaired(after)
        assert not again.actions, f"bit {bit} of {key}: the repair of a repaired store did {again.actions}"


@pytest.fixture
def raw(small: Small, fast: Path) -> tuple[Path, Path, bytes]:
    """A copy of the store whose data file is written over and over: its root, the data file, and the bytes of the intact one."""
    root = fast / "raw"
    shutil.copytree(small.root, root)
    (file,) = root.rglob("data.mdb")
    return root, file, file.read_bytes()


def test_any_flipped_bit_of_the_lmdb_file_is_named_or_changes_nothing(small: Small, raw: tuple[Path, Path, bytes]) -> None:
    root, file, intact = raw
    config = parse(f"file://{root}/objects?nvme={root}/nvme", {})
    chance = random.Random(3)
    live = unharmed = 0
    with ObjectStore(f"file://{root}/objects") as objects:
        for bit in sorted(chance.sample(range(len(intact) * 8), RAW)):
            for left in file.parent.parent.iterdir():
                shutil.rmtree(left)
            file.parent.mkdir()
            file.write_bytes(flip(intact, bit))
            held = held_by(file)
            without = None if held is None else restored(loaded(small.content.objects), loaded(held))
            small.check_live(without)
            done = repair(config, objects, Sample(1.0))
            assert not done.damage_left, f"bit {bit}: left {done.left}"
            after = held_by(file)
            assert after is not None
            cut = restored(objects, loaded(after))
            small.check_live(cut)
            assert cut is not None and done.newest is not None and cut.step == done.newest.step
            if held == small.content.nvme:
                assert not named(done) and cut.step == STEPS, "the bit is in no live byte"
                unharmed += 1
            else:
                assert named(done), f"bit {bit} changed something, and nothing is named"
                live += 1
                if str(file) in named(done):
                    assert cut.step == NEWEST_FULL, f"bit {bit}: the file as a whole is given up"
                elif held is not None and one_is_other(held, small.content.nvme):
                    assert cut.step == STEPS, f"bit {bit} of one object is not turned back"
                else:  # a name is another one, or several objects are
                    assert cut.step >= (NEWEST_FULL if without is None else without.step), f"bit {bit} costs more than without a repair"
            assert objects_intact(small, objects)
    assert live > 50 and unharmed > 50


def test_an_lmdb_file_that_falls_apart_while_it_is_repaired_is_moved_out_of_the_way(
    small: Small, raw: tuple[Path, Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, file, _ = raw
    key = next(key for key in small.content.nvme if "/inc/" in key)
    with LmdbBackend(file.parent, create=False) as nvme:
        nvme.put(key, flip(small.content.nvme[key], 9))

    def falls_apart(case: Case) -> None:
        put_good_bytes(case)
        with file.open("r+b") as opened:
            opened.seek(2 * 4096)  # behind the two pages that say where the tree begins
            opened.write(bytes(file.stat().st_size - 2 * 4096))
        monkeypatch.undo()

    monkeypatch.setattr(repair_module, "STAGES", (falls_apart,))
    with ObjectStore(f"file://{root}/objects") as objects:
        done = repair(parse(f"file://{root}/objects?nvme={root}/nvme", {}), objects, Sample(1.0))
        assert {key, str(file)} <= named(done) and not done.damage_left
        assert done.newest is not None and done.newest.step == NEWEST_FULL
        assert (file.parent.parent / "0.damaged-1" / "data.mdb").is_file()
        after = held_by(file)
        assert after is not None
        small.check_live(restored(objects, loaded(after)))


def held_by(file: Path) -> dict[str, bytes] | None:
    """What an LMDB file holds, `None` where it is refused."""
    try:
        with LmdbBackend(file.parent, create=False) as nvme:
            return {key: content for key, content in content_of(nvme).items() if not key.startswith(keys.QUARANTINE_PREFIX)}
    except BackendError:
        return None


def one_is_other(held: dict[str, bytes], intact: Mapping[str, bytes]) -> bool:
    """Whether exactly one object differs in its bytes."""
    return held.keys() == intact.keys() and sum(held[key] != intact[key] for key in held) == 1


def objects_intact(small: Small, objects: ObjectStore) -> bool:
    return content_of(objects) == dict(small.content.objects)

"""What a start cannot read of its log is kept: mended later, it gives the very cuts that the start had to do without."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from adacheck import set_aside
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.check import Check
from adacheck.check_records import Sample
from adacheck.config import StoreConfig, parse
from adacheck.errors import ConfigError
from adacheck.finding import Kind
from adacheck.manifests import keys
from adacheck.reading import open_objects, open_sources
from adacheck.recovery import Cut, read_newest
from adacheck.repair import repair
from adacheck.store import Store
from adacheck.tools import fsck, restore
from tests.test_damage import edit, increment_slot, oldest_base
from tests.tiny_run import Process, plain_objects
from tests.tool_run import run_tool

STEPS, BASE, FULL = 10, 4, 8
LONG = {"log_steps": 100}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run that was killed after ten steps; its log has bases at 4, where it moved to a new host, full checkpoints are at 4 and 8."""
    for start, stop in ((0, BASE), (BASE, STEPS)):
        trained(tmp_path, start, stop)
        if stop == BASE:
            shutil.rmtree(tmp_path / "nvme")
    return tmp_path


def trained(root: Path, start: int, stop: int) -> None:
    process = Process(root, options=LONG)
    assert process.ckpt.restore() == start
    for _ in range(start, stop):
        process.step()
    process.abandon()


def uri_of(root: Path, aside: int = 0) -> str:
    return f"file://{root}/objects?nvme={root}/nvme" + (f"&aside={aside}" if aside else "")


def newest(config: StoreConfig) -> Cut:
    with open_objects(config) as objects, open_sources(config, objects) as sources:
        assert sources is not None
        cut = read_newest(sources)
    assert cut is not None
    return cut


def digests(cut: Cut) -> Mapping[int, bytes]:
    return {number: state.digest() for number, state in cut.states.items()}


def damage(root: Path, what: str) -> None:
    """A flipped bit of a base, which costs every cut of the log, or of the newest increment, which costs that one."""
    with LmdbBackend(next(folder for folder in (root / "nvme").glob("*/0"))) as nvme:
        edit(nvme, f"{oldest_base(nvme)[0]}/000000" if what == "base" else increment_slot(nvme, STEPS, "gradient"), "flipped")


@pytest.mark.parametrize(("what", "fallen"), [("base", FULL), ("increment", STEPS - 1)])
def test_what_a_start_could_not_read_is_kept_mended_and_exported(
    root: Path, caplog: pytest.LogCaptureFixture, what: str, fallen: int
) -> None:
    before = newest(parse(uri_of(root), {}))
    damage(root, what)
    caplog.set_level(logging.WARNING, "adacheck")
    trained(root, fallen, 14)  # with a full checkpoint of its own at 12
    line = next(record.getMessage() for record in caplog.records if "is kept in" in record.getMessage())
    first = fallen + 1 if fallen == FULL else STEPS
    held = f"steps {first} to {STEPS}" if first < STEPS else f"step {STEPS}"
    assert f"may still hold {held}, goes on without" in line and f"/0.damaged-1: adacheck-fsck '{uri_of(root, 1)}' --repair" in line
    config = parse(uri_of(root, 1), {})
    assert newest(config).step == fallen, "its own lineage, as far as it can be read, and nothing of the start after it"
    with open_objects(config, writing=True) as objects:
        done = repair(config, objects, Sample(1.0))
    assert not done.damage_left and done.newest is not None and done.newest.step == STEPS
    again = newest(config)
    assert (again.step, again.opaque, digests(again)) == (STEPS, before.opaque, digests(before))
    assert run_tool(restore.main, uri_of(root, 1), "--to", str(root / "exported")).code == 0
    trained(root, 14, 14)


def test_a_script_without_restore_keeps_what_it_cannot_read_as_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has no cut that can be read, and there is no full checkpoint: its first `step()` begins the run anew."""
    trained(tmp_path, 0, FULL // 4)
    with plain_objects(tmp_path) as objects:  # as if it had been killed before the first one
        for key in [*objects.list(keys.FULL_PREFIX), *objects.list(keys.VERSIONS_PREFIX)]:
            objects.delete(key)
    with LmdbBackend(next(folder for folder in (tmp_path / "nvme").glob("*/0"))) as nvme:
        edit(nvme, keys.CHAIN, "flipped")
    process = Process(tmp_path, options=LONG)
    caplog.set_level(logging.WARNING, "adacheck")
    process.step()
    process.abandon()
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("rejected: chain record of lmdb:") for line in said), said
    assert any("may still hold steps 1 to 2, goes on without" in line and "/0.damaged-1: " in line for line in said), said
    assert [folder.name for folder in (tmp_path / "nvme").glob("*/0.*")] == ["0.damaged-1"]


def test_one_is_kept_at_a_time(root: Path) -> None:
    for number in (1, 2):
        damage(root, "increment")
        trained(root, STEPS - 1, STEPS)
        assert [folder.name for folder in sorted((root / "nvme").glob("*/0.*"))] == [f"0.damaged-{number}"]


def test_of_logs_that_cannot_even_be_opened_one_is_kept(root: Path) -> None:
    for number in (1, 2):
        (file,) = (root / "nvme").glob("*/0/data.mdb")
        file.write_bytes(b"\xa5" * 20_000)
        trained(root, FULL, FULL)
        assert [folder.name for folder in sorted((root / "nvme").glob("*/0.*"))] == [f"0.damaged-{number}"]


def test_one_that_can_be_mended_outlives_those_that_cannot_be_opened(root: Path) -> None:
    damage(root, "increment")
    trained(root, STEPS - 1, STEPS)
    for number in (2, 3):
        (file,) = (root / "nvme").glob("*/0/data.mdb")
        file.write_bytes(b"\xa5" * 20_000)
        trained(root, FULL, FULL)
        assert [folder.name for folder in sorted((root / "nvme").glob("*/0.*"))] == ["0.damaged-1", f"0.damaged-{number}"]
    with open_objects(parse(uri_of(root, 1), {}), writing=True) as objects:
        repair(parse(uri_of(root, 1), {}), objects, Sample(1.0))
    assert newest(parse(uri_of(root, 1), {})).step == STEPS


def test_a_check_tells_of_it_and_a_collection_ends_it(root: Path) -> None:
    damage(root, "base")
    trained(root, FULL, FULL)
    with open_objects(parse(uri_of(root), {})) as objects:
        findings = [found for found in Check(parse(uri_of(root), {}), objects, Sample()).findings() if found.kind is Kind.SET_ASIDE]
    assert [found.remedy.partition(" --list")[0] for found in findings] == [
        f"adacheck-fsck '{uri_of(root, 1)}' --repair mends what can be mended there, adacheck-restore '{uri_of(root, 1)}'"
    ]
    assert run_tool(fsck.main, uri_of(root), "--gc", "--older-than", "0s").code == 0
    assert not list((root / "nvme").glob("*/0.*"))


def test_a_start_that_is_killed_while_it_copies_loses_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = newest(parse(uri_of(root), {}))
    damage(root, "increment")

    def killed(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:5000])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", killed)
        process = Process(root, options=LONG)
        with pytest.raises(KeyboardInterrupt):
            process.ckpt.restore()
        process.abandon()
    assert [folder.name for folder in (root / "nvme").glob("*/0.*")] == ["0.copying"]
    trained(root, STEPS - 1, STEPS - 1)
    assert [folder.name for folder in (root / "nvme").glob("*/0.*")] == ["0.damaged-1"]
    with open_objects(parse(uri_of(root, 1), {}), writing=True) as objects:
        repair(parse(uri_of(root, 1), {}), objects, Sample(1.0))
    assert digests(newest(parse(uri_of(root, 1), {}))) == digests(before)


def test_a_disk_without_room_keeps_none_and_says_so(root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_aside, "free_bytes", lambda _folder: 1000)
    damage(root, "base")
    caplog.set_level(logging.WARNING, "adacheck")
    trained(root, FULL, FULL + 1)
    assert any("could not be kept for a repair" in r.getMessage() and "has room for 1000 bytes" in r.getMessage() for r in caplog.records)
    assert not list((root / "nvme").glob("*/0.*"))


def test_a_copy_that_fails_half_way_costs_nothing_that_was_kept(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(root, "increment")
    trained(root, STEPS - 1, STEPS)
    damage(root, "increment")
    kept = next((root / "nvme").glob("*/0.damaged-1/data.mdb")).read_bytes()

    def over_quota(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:5000])
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(shutil, "copyfile", over_quota)
    caplog.set_level(logging.WARNING, "adacheck")
    trained(root, STEPS - 1, STEPS)
    assert any("could not be kept for a repair" in r.getMessage() and "Disk quota exceeded" in r.getMessage() for r in caplog.records)
    assert [folder.name for folder in (root / "nvme").glob("*/0.*")] == ["0.damaged-1"]
    assert next((root / "nvme").glob("*/0.damaged-1/data.mdb")).read_bytes() == kept


def test_without_room_for_both_the_earlier_one_goes_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(root, "increment")
    trained(root, STEPS - 1, STEPS)
    damage(root, "increment")
    (log,) = (root / "nvme").glob("*/0/data.mdb")
    free, copyfile, beside = 2 * log.stat().st_size - 1, shutil.copyfile, list[str]()

    def copied(source: Path, target: Path) -> None:
        beside.extend(folder.name for folder in target.parent.parent.glob("0.damaged-*"))
        copyfile(source, target)

    monkeypatch.setattr(set_aside, "free_bytes", lambda _folder: free)
    monkeypatch.setattr(shutil, "copyfile", copied)
    trained(root, STEPS - 1, STEPS)
    assert not beside and [folder.name for folder in (root / "nvme").glob("*/0.*")] == ["0.damaged-2"]


@pytest.mark.parametrize("what", ["0.copying", "0.damaged-1"])
def test_what_cannot_be_removed_keeps_no_start_from_going_on(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (log,) = (root / "nvme").glob("*/0/data.mdb")
    log.parent.with_name(what).mkdir()
    if what == "0.damaged-1":
        log.write_bytes(b"\xa5" * 20_000)
    rmtree = shutil.rmtree

    def denied(path: Path, ignore_errors: bool = False) -> None:
        if path.name == what:
            raise PermissionError(errno.EACCES, "Permission denied")
        rmtree(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", denied)
    caplog.set_level(logging.WARNING, "adacheck")
    last = STEPS if what == "0.copying" else FULL
    trained(root, last, last + 1)
    assert any("could not be removed" in r.getMessage() and "Permission denied" in r.getMessage() for r in caplog.records)
    trained(root, last + 1, last + 1)


def test_one_that_is_not_there_is_no_other_lineage(root: Path) -> None:
    for tool in (restore, fsck):
        ended = run_tool(tool.main, uri_of(root, 3), *(["--list"] if tool is restore else []))
        assert ended.code not in (0, 1) and "was set aside as number 3" in ended.err and "none was" in ended.err
    damage(root, "base")
    trained(root, FULL, FULL)
    assert "there is aside=1" in run_tool(restore.main, uri_of(root, 3), "--list").err


def test_it_is_not_trained_on(root: Path) -> None:
    process = Process(root)
    with Store.open(uri_of(root, 1)) as store, pytest.raises(ConfigError, match="looked at and exported, not trained on"):
        store.attach(process.run.model, process.run.optimizer)
    process.abandon()


def test_a_log_without_newer_steps_is_not_kept(root: Path) -> None:
    """Nobody misses what a step that is restored holds as well."""
    with LmdbBackend(next(folder for folder in (root / "nvme").glob("*/0"))) as nvme:
        for step in (9, 10):
            nvme.delete(keys.increment(1, step))
        edit(nvme, f"{oldest_base(nvme)[0]}/000000", "flipped")
    trained(root, FULL, FULL)
    assert not list((root / "nvme").glob("*/0.*"))

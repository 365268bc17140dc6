"""`adacheck-fsck` as people and scripts meet it: without torch, beside a running trainer, exit codes, text and JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from adacheck.check_records import Sample
from adacheck.finding import Finding, Severity
from adacheck.manifests import keys
from adacheck.tools import fsck, restore
from tests.damaged_store import Copy, damage
from tests.tidy import ROOT
from tests.tool_run import run_tool

GOLDEN = ROOT / "tests" / "golden" / "v1" / "store"

NEEDED = ("blake3", "fsspec", "lmdb", "msgpack", "numpy", "rich", "typer", "zstandard")
"""What the tool needs beside the standard library, with what those need."""

TRAINER = """
import sys, time
import torch, adacheck
root, stop = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
store = adacheck.Store.open(f"file://{root}/objects", nvme=f"{root}/nvme", full_every=5, log_steps=3, refresh=4, keep=2)
ckpt = store.attach(model, optimizer)
ckpt.restore()
import os
step = 0
while not os.path.exists(stop):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    ckpt.step()
    step += 1
    if step == 30:
        print("running", flush=True)
    time.sleep(0.001)
ckpt.close()
print(step, flush=True)
"""


@pytest.fixture
def golden(tmp_path: Path) -> Copy:
    """A copy: to be read, LMDB wants to write its table of readers."""
    shutil.copytree(GOLDEN, tmp_path / "golden")
    return Copy(tmp_path / "golden")


def report_of(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("store", ["store", "packed"])
def test_the_golden_store_is_clean(tmp_path: Path, store: str) -> None:
    shutil.copytree(GOLDEN.with_name(store), tmp_path / "golden")
    ended = run_tool(fsck.main, Copy(tmp_path / "golden").uri, "--read-data", "--json")
    report = report_of(ended.out)
    assert (ended.code, report["findings"], report["newest_cut"]["step"]) == (0, [], 11)
    assert report["checked"]["data"] == 1.0 and report["checked"]["read_bytes"] > 50_000


def test_it_works_where_torch_cannot_be_imported(golden: Copy) -> None:
    script = "import sys; sys.modules['torch'] = None; from adacheck.tools.fsck import main; main()"
    done = subprocess.run([sys.executable, "-c", script, golden.uri, "--read-data"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "clean; newest cut: step 11" in done.stdout


def closure(names: Iterable[str]) -> set[Path]:
    """Files and folders in site-packages of these distributions, and of all that they need."""
    found, seen, waiting = set[Path](), set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # needed on other systems only
        assert name != "torch"
        tops = {file.parts[0] for file in distribution.files or () if not file.parts[0].startswith(".")}
        found |= {Path(str(distribution.locate_file(top))) for top in tops}
        waiting += [re.split(r"[^\w.-]", line)[0] for line in distribution.requires or () if "extra ==" not in line]
    return found


def test_it_works_in_a_venv_without_torch(golden: Copy, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for source in closure(NEEDED):
        (packages / source.name).symlink_to(source)
    (packages / "adacheck").symlink_to(ROOT / "adacheck")
    python, where = str(tmp_path / "venv" / "bin" / "python"), {"PATH": os.environ["PATH"]}
    absent = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True, cwd=tmp_path, env=where, check=False)
    assert "No module named 'torch'" in absent.stderr
    call = [python, "-m", "adacheck.tools.fsck", golden.uri, "--read-data", "--json"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=where, check=False)
    assert done.returncode == 0, done.stderr
    assert report_of(done.stdout)["clean"]


def test_beside_a_running_trainer_it_finds_nothing_false(tmp_path: Path) -> None:
    store, stop = Copy(tmp_path / "run"), tmp_path / "stop"
    call = [sys.executable, "-c", TRAINER, str(store.root), str(stop)]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}) as trainer:
        assert trainer.stdout is not None
        try:
            assert trainer.stdout.readline() == "running\n"
            newest = []
            for at in range(12):
                ended = run_tool(fsck.main, store.uri, "--json", *(["--read-data"] if at % 2 else []))
                report = report_of(ended.out)
                damaged = [finding for finding in report["findings"] if finding["severity"] != "note"]
                assert (ended.code, damaged) == (0, []), ended.err
                assert {finding["kind"] for finding in report["findings"]} <= {"unlisted", "orphan"}, "only what is being written"
                newest.append(report["newest_cut"]["step"])
                if at % 4 == 3:
                    taken = run_tool(restore.main, store.uri, "--to", str(tmp_path / f"out{at}"), "--json")
                    assert taken.code == 0, taken.err
                    assert report_of(taken.out)["step"] >= newest[-1] and report_of(taken.out)["tier"] == "nvme"
        finally:
            stop.touch()
        last = int(trainer.stdout.readline())
        assert trainer.wait() == 0
    assert newest == sorted(newest) and newest[0] < newest[-1] <= last
    ended = run_tool(fsck.main, store.uri, "--json", "--read-data")
    assert ended.code == 0 and report_of(ended.out)["findings"] == [] and report_of(ended.out)["newest_cut"]["step"] == last


def test_a_finding_is_told_in_words(golden: Copy) -> None:
    name = damage(golden, golden, keys.Kind.BASE_SLOT, "flip")
    ended = run_tool(fsck.main, golden.uri, "--read-data")
    assert ended.code == 4
    for words in (
        f"wrong bytes: nvme {name}",
        "expected ",
        "found ",
        "lost     every cut of this NVMe copy",
        "to do    ",
        "1 damaged, 0 notes",
    ):
        assert words in ended.out, ended.out
    assert "newest cut: step 8 from full/" in ended.out


def test_without_reading_data_a_flip_in_it_is_not_found(golden: Copy) -> None:
    damage(golden, golden, keys.Kind.BASE_SLOT, "flip")
    ended = run_tool(fsck.main, golden.uri, "--json")
    assert ended.code == 0 and report_of(ended.out)["checked"]["data"] == 0.0


def test_samples_of_the_data_find_a_flip_sooner_or_later(golden: Copy) -> None:
    damage(golden, golden, keys.Kind.SHARD, "flip")
    codes = [run_tool(fsck.main, golden.uri, "--json", "--read-data-subset", "50%").code for _ in range(40)]
    assert set(codes) == {0, 4}  # by chance otherwise in one of 2^39 runs
    assert run_tool(fsck.main, golden.uri, "--read-data-subset", "100%").code == 4


def test_a_sample_is_a_share_of_all_keys_and_differs_by_seed() -> None:
    names = [f"object-{at}" for at in range(2000)]
    tenth = [name for name in names if Sample(0.1, 1).has(name)]
    assert 140 < len(tenth) < 260 and tenth != [name for name in names if Sample(0.1, 2).has(name)]
    assert all(Sample(1.0).has(name) for name in names) and not any(Sample(0.0).has(name) for name in names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fil:///data/run"], "did you mean 'file'?"),
        (["/data/run"], "has no scheme"),
        (["s3://bucket/run?nvme=relative"], "is relative"),
        (["file:///data/run?ful_every=3"], "did you mean 'full_every'?"),
        (["file:///data/run", "--read-data-subset", "10"], "write 10%"),
        (["file:///data/run", "--read-data-subset", "0%"], "write 10%"),
        (["file:///data/run", "--read-data", "--read-data-subset", "5%"], "leave out one"),
        (["file:///data/run", "--repare"], "No such option"),
        ([], "Missing argument"),
    ],
)
def test_a_wrong_call_ends_with_16_and_says_why(arguments: list[str], words: str) -> None:
    ended = run_tool(fsck.main, *arguments)
    assert (ended.code, ended.out) == (16, "")
    assert words in " ".join(ended.err.replace("│", " ").split())


def test_what_cannot_be_checked_ends_with_8(golden: Copy, tmp_path: Path) -> None:
    absent = run_tool(fsck.main, f"file://{tmp_path}/absent")
    assert absent.code == 8 and "does not exist" in absent.err and not (tmp_path / "absent").exists()
    (tmp_path / "empty").mkdir()
    empty = run_tool(fsck.main, f"file://{tmp_path}/empty")
    assert empty.code == 8 and "there is no run" in empty.err
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("way", [[], ["--repair"], ["--gc"]])
def test_json_of_what_cannot_work_says_why(golden: Copy, tmp_path: Path, way: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    absent, empty, wrong = f"file://{tmp_path}/absent", f"file://{tmp_path}/empty", f"{golden.uri}&ful_every=3"
    for uri, code, words in ((absent, 8, "does not exist"), (empty, 8, "there is no run"), (wrong, 16, "did you mean")):
        ended = run_tool(fsck.main, uri, *way, "--json")
        report = json.loads(ended.out)
        assert list(report) == ["version", "uri", "error", "exit_code"] and (report["version"], report["uri"]) == (1, uri)
        assert ended.code == report["exit_code"] == code and words in report["error"] and report["error"] in ended.err


@pytest.mark.parametrize("tool", [fsck.main, restore.main])
def test_an_option_that_cannot_be_used_ends_with_16_in_one_line(tool: Callable[[], None]) -> None:
    for option in ("endpoint_url=localhost:8333", 'client_kwargs={"region_name":5}'):
        ended = run_tool(tool, f"s3://bucket/run?nvme=none&{option}", *(["--list"] if tool is restore.main else []))
        assert (ended.code, ended.out, ended.err.count("\n")) == (16, "", 1)
        assert option.partition("=")[0] in ended.err


@pytest.mark.parametrize("where", ["adacheck.tools.fsck.Check", "adacheck.tools.fsck.sample_of"])
def test_a_bug_ends_with_8_and_its_traceback_never_with_a_code_that_means_something_else(
    golden: Copy, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(where, broken)
    ended = run_tool(fsck.main, golden.uri, "--json")
    assert ended.code == 8 and "Traceback" in ended.err
    assert ended.err.splitlines()[-1] == "error: ZeroDivisionError: a bug: this is a bug, report it with the traceback above"
    if where.endswith("Check"):
        assert json.loads(ended.out)["exit_code"] == 8


def test_the_default_nvme_directory_inside_the_object_tier_is_no_orphan(golden: Copy) -> None:
    shutil.move(golden.root / "nvme", golden.root / "objects" / "nvme")
    ended = run_tool(fsck.main, f"file://{golden.root}/objects", "--read-data", "--json")
    assert ended.code == 0 and report_of(ended.out)["findings"] == []
    assert report_of(ended.out)["newest_cut"]["step"] == 11


def test_a_log_inside_the_object_tier_is_known_for_one_where_another_nvme_was_given(golden: Copy, tmp_path: Path) -> None:
    run = golden.nvme.parent.name
    shutil.move(golden.root / "nvme", golden.root / "objects" / "nvme")
    (golden.root / "objects" / "nvme" / "readme.txt").write_text("mine")
    ended = run_tool(fsck.main, f"file://{golden.root}/objects?nvme={tmp_path}/typo", "--read-data", "--json")
    found = {finding["name"]: finding for finding in report_of(ended.out)["findings"] if finding["kind"] == "orphan"}
    assert ended.code == 0 and found.keys() == {f"nvme/{run}/0", "nvme/readme.txt"}
    log = found[f"nvme/{run}/0"]
    assert "the log of this run" in log["found"] and "nothing" in log["lost"]
    checked = f"file://{golden.root}/objects?nvme={golden.root}/objects/nvme"
    assert log["remedy"] == f"leave it there: adacheck-fsck '{checked}' checks it"
    assert report_of(run_tool(fsck.main, checked, "--json").out)["newest_cut"]["step"] == 11


def test_advice_follows_from_the_newest_cut(golden: Copy) -> None:
    """A slot of the oldest increment is not needed by the newest cut; one of a base is, and then a full checkpoint is the newest."""
    slots = golden.names(keys.Kind.INCREMENT_SLOT)
    golden.write(keys.Kind.INCREMENT_SLOT, slots[0], bytes(len(golden.read(keys.Kind.INCREMENT_SLOT, slots[0]))))
    (finding,) = report_of(run_tool(fsck.main, golden.uri, "--read-data", "--json").out)["findings"]
    assert (finding["kind"], finding["name"]) == ("wrong bytes", slots[0])
    assert finding["remedy"].startswith("a restore takes step 11 from lmdb:") and "which does not need it" in finding["remedy"]
    base = damage(golden, golden, keys.Kind.BASE_SLOT, "flip")
    report = report_of(run_tool(fsck.main, golden.uri, "--read-data", "--json").out)
    remedies = {finding["name"]: finding["remedy"] for finding in report["findings"]}
    assert remedies.keys() == {slots[0], base}
    assert all(text.startswith("a restore takes step 8 from full/") for text in remedies.values()), remedies


def test_exit_codes_are_worded_alike() -> None:
    words = {
        0: "no damage",
        1: "all damage was repaired or given up",
        4: "damage is left",
        8: "it could not work",
        16: "it was called wrongly",
    }
    said = ", ".join(f"{code}: {text}" for code, text in words.items())
    shown = " ".join(run_tool(fsck.main, "--help").out.split())
    assert f"{said}." in shown and f"`adacheck-fsck` ends with {said}." in (ROOT / "README.md").read_text()
    operations = (ROOT / "docs" / "operations.md").read_text()
    assert all(f"| {code} | {text}" in operations for code, text in words.items())


def test_json_has_the_fields_it_promises(golden: Copy) -> None:
    damage(golden, golden, keys.Kind.VERSION, "empty")
    report = report_of(run_tool(fsck.main, golden.uri, "--json").out)
    assert list(report) == ["version", "uri", "run", "clean", "newest_cut", "checked", "findings"] and report["version"] == 1
    assert set(report["newest_cut"]) == {"step", "source", "tier"}
    assert set(report["checked"]) == {"objects", "read_bytes", "data", "seed"}
    (finding,) = report["findings"]
    assert list(finding) == list(Finding.__dataclass_fields__) and finding["severity"] == Severity.DAMAGE

"""`store.reader()`: what `dcp.load` puts into a fresh job is the cut bit for bit, from either tier, or the error says what is damaged."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan

import adacheck
from adacheck import kernel, nvme_reader
from adacheck.backends.object_store import ObjectStore
from adacheck.catalogue import listing, publish
from adacheck.errors import ConfigError, ForeignRun, NoCut
from adacheck.export import Export
from adacheck.full_checkpoint import CutId, write_full
from adacheck.incarnations import new_run, open_run, take_incarnation
from adacheck.manifests import keys
from adacheck.manifests.record import Fork
from adacheck.reader import _Reach, agreed
from adacheck.reading import open_sources
from adacheck.recovery import read_newest
from adacheck.states import State
from tests.damaged_store import Copy, damage, flip
from tests.dcp_job import dcp_load, digests, flat_state, load_job
from tests.test_full_checkpoint import chunk, model, odd_dtypes, replace_number, source
from tests.tidy import ROOT
from tests.tiny_run import Process, Snapshot, TinyRun, reference

BASE, REPLAYED = 4, 24
NEWEST = BASE + REPLAYED
DEADLINE_S = 60


@pytest.fixture(scope="module")
def expected() -> list[Snapshot]:
    return reference(NEWEST)


@pytest.fixture(scope="module")
def stored() -> Iterator[Path]:
    """Full checkpoints at 1, 4 and 28; NVMe has bases of all states at 4, where the run moved to a new host, and 24 increments."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for start, stop in ((0, BASE), (BASE, NEWEST)):
            process = Process(root, options={"log_steps": 100, "full_every": 1000, "keep": 9})
            assert process.ckpt.restore() == start
            for _ in range(start, stop):
                process.step()
            process.ckpt.publish_full()
            process.abandon()
            if stop == BASE:
                shutil.rmtree(root / "nvme")
        yield root


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Copy:
    """A copy of the run, to be damaged."""
    shutil.copytree(stored, tmp_path / "run")
    return Copy(tmp_path / "run")


def object_tier(root: Path) -> adacheck.Store:
    """The store as another host sees it."""
    return adacheck.Store.open(f"file://{root}/objects?nvme=none")


def both(root: Path) -> adacheck.Store:
    return adacheck.Store.open(f"file://{root}/objects?nvme={root}/nvme")


def check(run: TinyRun, wanted: Snapshot) -> None:
    """Model, optimizer and hyperparameters are those of the cut; the generators are nobody's business here."""
    found = run.snapshot()
    for name in (name for name in wanted if name.startswith(("model.", "optimizer.", "groups"))):
        assert found[name] == wanted[name], name


@pytest.mark.parametrize(("tier", "step"), [("nvme", NEWEST), ("object", NEWEST), ("object", BASE), ("both", BASE)])
def test_a_fresh_job_becomes_the_cut(
    stored: Path, expected: list[Snapshot], tier: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adacheck")
    with object_tier(stored) if tier == "object" else both(stored) as store:
        run = TinyRun()
        reader = store.reader(step)
        load_job(run.model, run.optimizer, reader)
        check(run, expected[step])
        assert reader.step == step
    assert ("lmdb" in caplog.text) == (tier == "nvme"), "the source that was meant"


def test_the_newest_is_replayed_on_top_of_the_bases(stored: Path, expected: list[Snapshot], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nvme_reader.NvmeReader] = []
    states = nvme_reader.NvmeReader.states

    def noted(self: nvme_reader.NvmeReader, wanted: Collection[int]) -> dict[int, State]:
        made.append(self)
        return states(self, wanted)

    monkeypatch.setattr(nvme_reader.NvmeReader, "states", noted)
    monkeypatch.setattr(nvme_reader, "BATCH_BYTES", 1)  # every state is a batch of its own
    for step in ("latest", None):
        run = TinyRun()
        with both(stored) as store:
            load_job(run.model, run.optimizer, store.reader(step))
        check(run, expected[NEWEST])
        assert len(made) == 4 and set(made[0].replayed.values()) == {REPLAYED}, "the full checkpoint brought the certificates"
        made.clear()


def test_the_keys_are_those_of_the_export_and_more_than_the_job_has(copy: Copy) -> None:
    with both(copy.root) as store:
        metadata = store.reader().read_metadata()
        with open_sources(store.config, store.objects) as sources:
            assert sources is not None
            cut = read_newest(sources)
    assert cut is not None
    exported = Export(cut, CutId("run", 1, 1, cut.step), {}).flat()
    run = TinyRun()
    assert set(metadata.state_dict_metadata) == set(exported) >= set(flat_state(run.model, run.optimizer))
    assert "optim.param_groups.0.weight.initial_lr" in exported, "what a scheduler added, and only a job with one asks for"


def test_a_missing_step_names_the_nearest(stored: Path, tmp_path: Path) -> None:
    with both(stored) as store:
        with pytest.raises(NoCut, match=r"step 3 .* the nearest is 4"):
            store.reader(3)
        with pytest.raises(NoCut, match=f"step 99 .* the nearest is {NEWEST}"):
            store.reader(99)
    with adacheck.Store.open(f"file://{tmp_path}/none") as store, pytest.raises(NoCut, match="no run at"):
        store.reader()
    with adacheck.Store.open(f"file://{tmp_path}/fresh") as store:
        run = TinyRun()
        ckpt = store.attach(run.model, run.optimizer)
        ckpt.restore()
        with pytest.raises(NoCut, match="no cut yet"):
            store.reader()
        ckpt.close()


def test_a_damaged_shard_is_named_and_the_other_tier_takes_over(copy: Copy, expected: list[Snapshot]) -> None:
    for name in copy.names(keys.Kind.SHARD):
        content = copy.read(keys.Kind.SHARD, name)
        copy.write(keys.Kind.SHARD, name, content[:-1] + bytes([content[-1] ^ 1]))  # of the last tensor; the middle is the header
    run = TinyRun()
    with object_tier(copy.root) as store, pytest.raises(CheckpointException, match=r"shard-00001-of-00001\.safetensors") as raised:
        load_job(run.model, run.optimizer, store.reader(NEWEST))
    assert "the nearest is 4" in str(raised.value)
    with both(copy.root) as store:
        load_job(run.model, run.optimizer, store.reader(NEWEST))
    check(run, expected[NEWEST])


@pytest.mark.parametrize("kind", [keys.Kind.BASE_SLOT, keys.Kind.INCREMENT_SLOT, keys.Kind.CHAIN])
def test_damage_on_nvme_falls_to_the_object_tier(
    copy: Copy, expected: list[Snapshot], kind: keys.Kind, caplog: pytest.LogCaptureFixture
) -> None:
    damage(copy, copy, kind, "flip")
    run = TinyRun()
    with both(copy.root) as store:
        load_job(run.model, run.optimizer, store.reader())
    check(run, expected[NEWEST])
    assert kind is keys.Kind.CHAIN or f"rejected: cut {NEWEST} from lmdb" in caplog.text


def test_what_cannot_be_replayed_here_is_read_from_the_object_tier(
    copy: Copy, expected: list[Snapshot], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(next(path.parent for path in copy.root.rglob("shard*") if f"step-{NEWEST:012}" in str(path)))
    monkeypatch.setattr(nvme_reader, "environment", lambda: replace(kernel.environment(), torch_build="another"))
    run = TinyRun()
    with both(copy.root) as store:
        load_job(run.model, run.optimizer, store.reader())
    check(run, expected[BASE])
    assert "recorded with torch build" in caplog.text


def test_only_what_is_asked_for_is_read(copy: Copy, expected: list[Snapshot]) -> None:
    victim = copy.names(keys.Kind.BASE_SLOT)[0]  # of state 0
    copy.write(keys.Kind.BASE_SLOT, victim, flip(copy.read(keys.Kind.BASE_SLOT, victim)))
    shutil.rmtree(next(path.parent for path in copy.root.rglob("shard*") if f"step-{NEWEST:012}" in str(path)))
    with both(copy.root) as store:
        other = {"model.3.bias": torch.zeros(2), "optim.state.3.bias.exp_avg": torch.zeros(2)}
        dcp_load(other, store.reader(NEWEST))
        assert (
            digests(other)["model.3.bias"]
            == digests({"": torch.frombuffer(bytearray(expected[NEWEST]["model.3.bias"]), dtype=torch.float32)})[""]
        )
        with pytest.raises(CheckpointException, match="does not match its digest"):
            dcp_load({"model.0.weight": torch.zeros(5, 6)}, store.reader(NEWEST))


def test_dcp_says_what_is_missing_and_nothing_stays_open(copy: Copy, expected: list[Snapshot]) -> None:
    with both(copy.root) as store:
        reader = store.reader()
        with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.none"):
            dcp_load({"model.none": torch.zeros(1)}, reader)
        with pytest.raises(CheckpointException, match=r"Size mismatch .* model\.3\.bias"):
            dcp_load({"model.3.bias": torch.zeros(3)}, reader)
        with pytest.raises(CheckpointException, match=r"model\.3\.bias is torch\.float32 \[2\] in the cut, torch\.bfloat16 \[2\] here"):
            dcp_load({"model.3.bias": torch.zeros(2, dtype=torch.bfloat16)}, reader)
        with pytest.raises(ConfigError, match="checkpoint_id"):
            reader.reset("elsewhere")
        assert not reader.validate_checkpoint_id("elsewhere")
    process = Process(copy.root)  # takes the lock and opens the log, in this process
    assert process.ckpt.restore() == NEWEST
    process.step()
    run = TinyRun()
    reader = process.store.reader()
    load_job(run.model, run.optimizer, reader)
    assert reader.step == NEWEST + 1, "beside a trainer of this process"
    check(run, process.run.snapshot())
    process.abandon()
    with pytest.raises(NoCut):
        object_tier(copy.root).reader(NEWEST + 1)


def test_tensors_that_come_after_the_planning_are_not_taken_for_those_planned(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.ckpt.restore()
    process.step()
    reader = process.store.reader()
    reader.read_metadata()
    process.run.model.register_parameter("late", torch.nn.Parameter(torch.ones(3)))
    process.step()
    with pytest.raises(NoCut, match="step 2 has other tensors than that at step 1"):
        reader.prepare_local_plan(LoadPlan([]))
    process.abandon()


def test_compressed_increments_are_replayed(tmp_path: Path) -> None:
    process = Process(tmp_path, options={"compress": "zstd:1", "full_every": 1000}, width=40)
    process.ckpt.restore()
    for _ in range(8):
        process.step()
    run, reader = TinyRun(width=40), process.store.reader()
    load_job(run.model, run.optimizer, reader)
    check(run, process.run.snapshot())
    assert reader.step == 8
    process.abandon()


def test_while_another_process_trains(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.tiny_run import Process\n"
        "process = Process(Path(sys.argv[1])); process.ckpt.restore(); process.step(); print('ready', flush=True)\n"
        "while process.ckpt._step < 400: process.step(drain=False); time.sleep(0.005)\n"
        "sys.stdin.read()"
    )
    runs = dict(enumerate(reference(400)))
    seen = set()
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdin=-1, stdout=-1, text=True) as trainer:
        try:
            assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
            with both(tmp_path) as store:
                for _ in range(8):
                    run, reader = TinyRun(), store.reader()
                    load_job(run.model, run.optimizer, reader)
                    check(run, runs[reader.step])
                    seen.add(reader.step)
        finally:
            trainer.kill()
    assert len(seen) > 1, "it went on meanwhile"


def test_steps_lists_what_can_be_read(copy: Copy, caplog: pytest.LogCaptureFixture) -> None:
    (copy.nvme / "data.mdb").write_bytes(b"nonsense" * 1000)
    with both(copy.root) as store:
        assert [(point.step, point.tiers) for point in store.steps()] == [(1, ("object",)), (BASE, ("object",)), (NEWEST, ("object",))]
        assert "not listed: the NVMe copy" in caplog.text
        run = TinyRun()
        load_job(run.model, run.optimizer, store.reader())


def test_several_optimizers_tied_parameters_and_tensor_hyperparameters(tmp_path: Path) -> None:
    def job(seed: int) -> tuple[torch.nn.Module, dict[str, torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(6, 4), "mid": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 6, bias=False)}
        )
        model.get_submodule("head").weight = model.get_parameter("embed.weight")
        first = torch.optim.AdamW([model.get_parameter("embed.weight")], lr=torch.tensor(0.1), betas=(0.8, 0.9))
        return model, {"first": first, "second": torch.optim.SGD(model.get_submodule("mid").parameters(), lr=0.1, momentum=0.9)}

    model, optimizers = job(0)
    embed, mid, head = model.children()
    with adacheck.Store.open(f"file://{tmp_path}") as store:
        ckpt = store.attach(model, optimizers)
        for _ in range(3):
            head(mid(embed(torch.arange(6)))).square().sum().backward()
            for optimizer in optimizers.values():
                optimizer.step()
            ckpt.step()
        ckpt.publish_full()
        ckpt.close()
        for tier in (store, object_tier_of(tmp_path)):
            wanted: dict[str, Any] = {}
            for name, optimizer in optimizers.items():
                wanted.update(
                    {
                        f"optim.{name}.{key.removeprefix('optim.')}": value
                        for key, value in flat_state(model, optimizer).items()
                        if key.startswith("optim.")
                    }
                )
            wanted.update({f"model.{key}": value for key, value in model.state_dict().items()})
            found = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in wanted.items()}
            dcp_load(found, tier.reader())
            assert digests(found) == digests(wanted)
            assert {"model.head.weight", "optim.first.state.embed.weight.exp_avg", "optim.first.param_groups.embed.weight.lr"} <= set(found)
            assert found["optim.first.param_groups.embed.weight.betas"] == (0.8, 0.9)


def object_tier_of(root: Path) -> adacheck.Store:
    return adacheck.Store.open(f"file://{root}?nvme=none")


def test_ranks_agree_on_one_cut() -> None:
    def reach(step: int, *others: int, run: str = "run", started_from: int = 0) -> _Reach:
        return _Reach(run, step, frozenset([step, *others]), (Fork(run, 1, started_from, True),))

    assert agreed([reach(5, 4), reach(5)]) == 5
    assert agreed([reach(9, 8, 3), reach(8, 3), reach(10, 9, 8, 3)]) == 8
    with pytest.raises(NoCut, match="rank 0 9, rank 1 7"):
        agreed([reach(9, 8), reach(7)])
    with pytest.raises(ForeignRun, match="other, run"):
        agreed([reach(9), reach(9, run="other")])
    with pytest.raises(NoCut, match="was restarted while the ranks looked at the store"):
        agreed([reach(9), reach(9, started_from=4)])


def test_chunks_of_one_tensor_and_odd_dtypes_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(30, dtype=torch.float32).reshape(10, 3)
    chunks = [chunk(0, (0, 4), whole), chunk(1, (4, 5), whole), chunk(2, (5, 5), whole), chunk(3, (5, 10), whole)]
    others = [replace_number(held, 4 + at) for at, held in enumerate([*model()[:5], *odd_dtypes()])]
    with ObjectStore(f"file://{tmp_path}") as objects:
        run = open_run(objects, new_run()).run
        incarnation = take_incarnation(objects, run).incarnation
        entry = write_full(objects, CutId(run, 1, incarnation, 7), [source(held) for held in (*chunks, *others)], [])
        publish(objects, run, incarnation, listing(entry))
    wanted = {f"model.{held.spec.fqn}": held.tensors["param"] for held in others} | {"model.w": whole}
    found = {
        key: torch.zeros_like(tensor.view(torch.uint8) if tensor.dim() else tensor).view(tensor.dtype) for key, tensor in wanted.items()
    }
    with object_tier_of(tmp_path) as store:
        dcp_load(found, store.reader(7))
    assert digests(found) == digests(wanted)

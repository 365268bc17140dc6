"""`adacheck-restore`: what it writes is the cut, in each format and for its stock reader; what it cannot do leaves nothing behind."""

from __future__ import annotations

import collections
import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import blake3
import msgpack
import numpy
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import adacheck
from adacheck import export
from adacheck.backends.object_store import ObjectStore
from adacheck.errors import ConfigError
from adacheck.export_values import loadable, summary
from adacheck.full_checkpoint import write_full
from adacheck.incarnations import new_run, open_run
from adacheck.manifests import keys
from adacheck.reading import OBJECT_TIER_ONLY
from adacheck.tools import fsck, restore
from tests.damaged_store import Copy, damage
from tests.golden.make_golden import Tiny, digests
from tests.seaweed import BUCKET, s3_server
from tests.test_check import contents
from tests.test_fsck import GOLDEN
from tests.tidy import ROOT
from tests.tool_run import Ended, run_tool

EXPECTED: dict[str, dict[str, str]] = json.loads((GOLDEN / "expected.json").read_text())
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def golden(tmp_path: Path) -> Copy:
    shutil.copytree(GOLDEN, tmp_path / "golden")
    return Copy(tmp_path / "golden")


def taken(store: Copy, to: Path, *options: str) -> dict[str, Any]:
    """Run the tool, which must succeed in silence, and give what it says."""
    ended = run_tool(restore.main, store.uri, "--to", str(to), "--json", *options)
    assert (ended.code, ended.err) == (0, "")
    described: dict[str, Any] = json.loads(ended.out)
    assert described.pop("directory") == str(to)
    assert described == json.loads((to / "restored.json").read_text())
    return described


def refused(store: Copy, to: Path, *options: str) -> Ended:
    """Run the tool, which must fail and leave neither the directory nor a part of it."""
    ended = run_tool(restore.main, store.uri, "--to", str(to), *options)
    assert ended.code != 0 and ended.out == ""
    assert not to.exists() and not list(to.parent.glob(f".{to.name}*"))
    return ended


def of(described: dict[str, Any]) -> dict[str, str]:
    return {key: tensor["digest"] for key, tensor in described["tensors"].items()}


def job() -> tuple[Tiny, torch.optim.Optimizer]:
    """The golden job, untrained."""
    model = Tiny()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1.0, fused=True)


@pytest.mark.parametrize("store", ["store", "packed"])
def test_the_golden_store_gives_its_newest_cut(tmp_path: Path, store: str) -> None:
    shutil.copytree(GOLDEN.with_name(store), tmp_path / "golden")
    expected = json.loads((tmp_path / "golden" / "expected.json").read_text())
    ended = run_tool(restore.main, Copy(tmp_path / "golden").uri, "--to", str(tmp_path / "out"), "--json")
    described = json.loads(ended.out)
    replayed = "cannot be replayed here" not in ended.err  # another build of torch may not promise the same bits
    assert ended.code == 0 and (described["step"], described["tier"]) == ((11, "nvme") if replayed else (8, "object"))
    assert of(described) == expected[str(described["step"])]


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize("kind", list(export.Format))
def test_the_golden_store_gives_its_full_checkpoints(golden: Copy, tmp_path: Path, step: int, kind: export.Format) -> None:
    before = contents(golden)
    described = taken(golden, tmp_path / "out", "--step", str(step), "--format", kind)
    assert (described["step"], described["tier"], described["format"]) == (step, "object", kind)
    assert of(described) == EXPECTED[str(step)]
    assert contents(golden) == before, "the store was written to"


def test_stock_torch_loads_the_safetensors(golden: Copy, tmp_path: Path) -> None:
    described = taken(golden, tmp_path / "out")
    state = {key: torch.empty(it["shape"], dtype=getattr(torch, it["dtype"])) for key, it in described["tensors"].items()}
    dcp_load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    for key, tensor in state.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert blake3.blake3(blake3.blake3(raw).digest()).hexdigest() == EXPECTED["11"][key], key
    assert "model.embed.weight" in state and "model.head.weight" not in state, "tied tensors are stored under one name"


def test_stock_torch_loads_the_dcp_folder_into_a_fresh_job(golden: Copy, tmp_path: Path) -> None:
    taken(golden, tmp_path / "out", "--format", "dcp")
    model, optimizer = job()
    get_state_dict(model, optimizer, options=FLAT)  # runs a step to create the optimizer's state
    parts: dict[str, dict[str, Any]] = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=FLAT), strict=True))
    flat = {f"{part}.{key}": value for part, values in parts.items() for key, value in values.items()}
    dcp_load(flat, checkpoint_id=tmp_path / "out", no_dist=True)
    model_state = {key.removeprefix("model."): value for key, value in flat.items() if key.startswith("model.")}
    optim_state = {key.removeprefix("optim."): value for key, value in flat.items() if key.startswith("optim.")}
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state, options=FLAT)
    assert digests(model, optimizer) == EXPECTED["11"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**3)


def test_torch_loads_the_torch_file_without_running_anything(golden: Copy, tmp_path: Path) -> None:
    taken(golden, tmp_path / "out", "--format", "torch")
    read = torch.load(tmp_path / "out" / export.TORCH_FILE, weights_only=True)
    model, optimizer = job()
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optim"], options=FLAT)
    assert digests(model, optimizer) == EXPECTED["11"]
    plain_model, plain = job()
    plain_model.load_state_dict(read["model"])
    plain.load_state_dict(read["optimizer"])  # as a script without torch.distributed.checkpoint does
    assert digests(plain_model, plain) == EXPECTED["11"] and plain.state_dict()["param_groups"] == read["optimizer"]["param_groups"]
    assert read["opaque"]["extra/scheduler"]["last_epoch"] == 11 and set(read["opaque"]) == {"rng", "optimizer/optim", "extra/scheduler"}


@pytest.mark.parametrize("kind", list(export.Format))
def test_opaque_items_lie_beside_as_they_are_and_for_people(golden: Copy, tmp_path: Path, kind: export.Format) -> None:
    taken(golden, tmp_path / "out", "--step", "8", "--format", kind)
    (stored,) = (golden.root / "objects").rglob("step-000000000008-*/opaque.msgpack")
    assert (tmp_path / "out" / "opaque.msgpack").read_bytes() == stored.read_bytes()
    shown = json.loads((tmp_path / "out" / "opaque.json").read_text())
    assert shown["extra/scheduler"]["last_epoch"] == 8 and set(shown) == set(msgpack.unpackb(stored.read_bytes()))


def test_parameters_are_renamed(golden: Copy, tmp_path: Path) -> None:
    rules = ("--map-fqn", "embed.weight=tokens.weight", "--map-fqn", "norm.=final.norm.")
    described = taken(golden, tmp_path / "out", "--step", "8", "--format", "torch", *rules)
    names = {"embed.weight": "tokens.weight", "norm.weight": "final.norm.weight", "norm.bias": "final.norm.bias"}
    assert described["renamed"] == names
    wanted = EXPECTED["8"]
    for old, new in names.items():
        wanted = {key.replace(old, new): digest for key, digest in wanted.items()}
    assert of(described) == wanted
    read = torch.load(tmp_path / "out" / export.TORCH_FILE, weights_only=True)
    assert "param_groups.final.norm.bias.lr" in read["optim"] and "param_groups.norm.bias.lr" not in read["optim"]
    assert torch.equal(read["model"]["head.weight"], read["model"]["tokens.weight"]), "the other name of the tied one"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--map-fqn", "head=x"], 16, "has no 'head'"),
        (["--map-fqn", "norm.weight=norm.bias"], 16, "two parameters"),
        (["--map-fqn", "norm.weight"], 16, "old=new"),
        (["--step", "newest"], 16, "neither a step nor 'latest'"),
        (["--step", "5"], 4, "step 5 that can be restored nowhere"),
        (["--format", "pickle"], 16, "pickle"),
    ],
)
def test_what_cannot_be_done_is_said(golden: Copy, tmp_path: Path, options: list[str], code: int, words: str) -> None:
    ended = refused(golden, tmp_path / "out", *options)
    assert ended.code == code and words in " ".join(ended.err.replace("│", " ").split())


def test_wrong_addresses(golden: Copy, tmp_path: Path) -> None:
    to = ("--to", str(tmp_path / "out"))
    wrong = run_tool(restore.main, "fil:///data", *to)
    assert wrong.code == 16 and "did you mean 'file'?" in wrong.err
    neither = run_tool(restore.main, golden.uri)
    assert neither.code == 16 and "--to DIR, --list, or --report" in neither.err
    absent = run_tool(restore.main, f"file://{tmp_path}/absent", *to)
    assert absent.code == 8 and not (tmp_path / "absent").exists()
    (tmp_path / "empty").mkdir()
    empty = run_tool(restore.main, f"file://{tmp_path}/empty", *to)
    assert empty.code == 4 and "there is no run" in empty.err
    foreign = tmp_path / "nvme" / "01234567-89ab-cdef-0123-456789abcdef"
    foreign.mkdir(parents=True)
    other = run_tool(restore.main, f"file://{golden.root}/objects?nvme={foreign.parent}", *to)
    assert other.code == 8 and foreign.name in other.err
    assert not (tmp_path / "out").exists()


def test_a_log_that_cannot_be_read_at_all_is_said_and_the_object_tier_is_used(golden: Copy, tmp_path: Path) -> None:
    (golden.nvme / "data.mdb").write_bytes(b"nonsense" * 1000)
    ended = run_tool(restore.main, golden.uri, "--to", str(tmp_path / "out"), "--json")
    assert ended.code == 0 and "rejected: the NVMe copy" in ended.err
    assert of(json.loads(ended.out)) == EXPECTED["8"]
    listed = run_tool(restore.main, golden.uri, "--list", "--json")
    assert [point["step"] for point in json.loads(listed.out)["points"]] == [4, 8] and "not listed: the NVMe copy" in listed.err


def test_tools_that_read_look_at_an_s3_object_tier_alone(golden: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server().environment.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{BUCKET}/without-nvme"
    with ObjectStore(uri) as objects, ObjectStore(f"file://{golden.root}/objects") as origin:
        for key in origin.list(""):
            objects.put(key, origin.get(key))
    ended = run_tool(restore.main, uri, "--to", str(tmp_path / "out"), "--json")
    assert (ended.code, ended.err) == (0, OBJECT_TIER_ONLY + "\n")
    assert of(json.loads(ended.out)) == EXPECTED["8"]
    checked = run_tool(fsck.main, uri)
    assert (checked.code, checked.err) == (0, OBJECT_TIER_ONLY + "\n") and "newest cut: step 8" in checked.out
    with pytest.raises(ConfigError, match="needs nvme=DIR"):
        adacheck.Store.open(uri)
    assert run_tool(restore.main, f"{uri}?nvme=none", "--list").err == "", "who says so is not told"


def test_the_directory_must_be_new_or_empty(golden: Copy, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "full" / "sub").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name in ("file", "full"):
        ended = run_tool(restore.main, golden.uri, "--to", str(tmp_path / name))
        assert ended.code == 16 and "not empty" in ended.err
    assert (tmp_path / "file").read_bytes() == b"mine" and (tmp_path / "full" / "sub").is_dir()
    taken(golden, tmp_path / "empty")
    taken(golden, tmp_path / "deep" / "er")


def test_the_list(golden: Copy, tmp_path: Path) -> None:
    ended = run_tool(restore.main, golden.uri, "--list", "--json")
    listed = json.loads(ended.out)
    assert ended.code == 0 and listed["version"] == 1
    assert [(point["step"], point["tiers"], point["proven"]) for point in listed["points"]] == [
        (4, ["object"], True),
        (8, ["object"], False),
        (11, ["nvme"], False),
    ]
    assert all(point["intact"] and point["exact"] for point in listed["points"])
    table = run_tool(restore.main, golden.uri, "--list")
    assert table.out.endswith(
        "\nintact: the records link up. No bytes were read: adacheck-fsck --read-data reads and checks them, and so does a restore.\n"
    )
    assert table.code == 0 and all(word in table.out for word in (listed["run"], "step", "tiers", "proven", "11"))
    with ObjectStore(f"file://{tmp_path}/fresh") as objects:
        open_run(objects, new_run())
    fresh = run_tool(restore.main, f"file://{tmp_path}/fresh", "--list")
    assert fresh.code == 4 and "no cut" in fresh.err


def test_listing_takes_no_torch(golden: Copy) -> None:
    script = "import sys; sys.modules['torch'] = None; from adacheck.tools.restore import main; main()"
    ended = subprocess.run([sys.executable, "-c", script, golden.uri, "--list"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "") and "object" in ended.stdout


def test_where_everything_is_damaged_it_refuses(golden: Copy, tmp_path: Path) -> None:
    damage(golden, golden, keys.Kind.BASE_SLOT, "flip")
    for name in golden.names(keys.Kind.SHARD):
        golden.write(keys.Kind.SHARD, name, b"")
    ended = refused(golden, tmp_path / "out")
    assert ended.code == 4 and ended.err.count("rejected: cut ") >= 3


@pytest.mark.parametrize("kind", list(export.Format))
def test_other_bytes_than_the_cuts_are_never_given_the_name(
    golden: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: export.Format
) -> None:
    def off(flat: dict[str, Any]) -> dict[str, Any]:
        return {key: value + 1 if key.endswith("norm.bias") else value for key, value in flat.items()}

    def write_and_flip(store: ObjectStore, *args: Any, **kwargs: Any) -> Any:
        entry = write_full(store, *args, **kwargs)
        (shard,) = (key for key in store.list("full/") if key.endswith(".safetensors"))
        content = store.get(shard)
        store.put(shard, content[:-1] + bytes([content[-1] ^ 1]))
        return entry

    torch_save, dcp_save = torch.save, state_dict_saver.save
    if kind is export.Format.SAFETENSORS:
        monkeypatch.setattr(export, "write_full", write_and_flip)
    elif kind is export.Format.DCP:
        monkeypatch.setattr(state_dict_saver, "save", lambda flat, **options: dcp_save(off(flat), **options))
    else:
        monkeypatch.setattr(torch, "save", lambda it, file: torch_save({**it, "model": off(it["model"])}, file))
    ended = refused(golden, tmp_path / "out", "--format", kind)
    assert ended.code == 8 and ("norm.bias was read back" in ended.err or "do not match their digest" in ended.err)


@pytest.mark.parametrize("error", [RuntimeError("no space"), CheckpointException("no space", {})])
def test_what_torch_cannot_write_is_said(golden: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(state_dict_saver, "save", mock.Mock(side_effect=error))
    ended = refused(golden, tmp_path / "out", "--format", "dcp")
    assert ended.code == 8 and "step 11 cannot be written" in ended.err


def test_a_killed_export_leaves_nothing_under_the_name(golden: Copy, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom adacheck import export\nfrom adacheck.tools import restore\n"
        "export.describe = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nrestore.main()\n"
    )
    call = [sys.executable, "-c", script, golden.uri, "--to", str(tmp_path / "out")]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
    (partial,) = tmp_path.glob(".out.partial-*")
    assert list(partial.glob("*.safetensors")), "it was killed after the shards were written"
    taken(golden, tmp_path / "out")


def test_values_for_people_and_for_torch() -> None:
    value: dict[Any, Any] = {
        1: numpy.arange(3, dtype=numpy.uint32),
        "q": collections.deque([1, 2]),
        "t": (1, b"xy", {2}),
        "nan": math.nan,
        "long": list(range(40)),
        "s": numpy.float32(0.5),
        "tensor": torch.ones(2),
    }
    shown = json.loads(json.dumps(summary(value), allow_nan=False))
    assert shown["1"] == {"array": "uint32", "shape": [3], "blake3": blake3.blake3(value[1].tobytes()).hexdigest()}
    assert shown["long"]["length"] == 40 and shown["nan"] == "nan" and shown["q"] == [1, 2] and shown["t"][0] == 1
    assert shown["tensor"]["tensor"] == "float32"
    plain = loadable(value)
    assert torch.equal(plain[1], torch.tensor([0, 1, 2], dtype=torch.uint32)) and plain["q"] == [1, 2] and plain["t"] == (1, b"xy", {2})
    assert type(plain["s"]) is float

"""Packed segments: the same bits come back, nothing grows, and no frame is expanded beyond what its record says."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from adacheck.backends.errors import Full
from adacheck.backends.lmdb_store import LmdbBackend
from adacheck.backends.memory import MemoryBackend
from adacheck.check_nvme import CopyRecords, check_slots
from adacheck.check_records import Look, Sample
from adacheck.config import parse
from adacheck.digest import digest
from adacheck.errors import ConfigError, DamagedCut
from adacheck.finding import Kind, Tier
from adacheck.manifests.chain import segments
from adacheck.manifests.record import SEGMENT_BYTES_MAX, Base, Segment, StateSpec
from adacheck.planes import WIDTHS, Packer, packed, unpack, unpacked
from adacheck.report.facts import gather_facts
from adacheck.tools import fsck
from tests.faults import Faulty
from tests.survival import OPTIONS, Make, survives
from tests.test_derived import Own, copy_seen, each, with_masters
from tests.test_outage import Switch, steps
from tests.tiny_run import Process, differing, reference
from tests.tool_run import run_tool
from tests.training import Job, logged, opened, payloads, restored_bits

PACKER = Packer(1)


def segment(content: bytes, elements: int, width: int, codec: str = "raw") -> Segment:
    return Segment("param", 5, 5 + elements, packed(codec, width), 1.0, 3, len(content), digest(content))


@given(st.sampled_from(WIDTHS), st.binary(min_size=1, max_size=64), st.integers(1, 200), st.randoms())
def test_any_bits_come_back(width: int, pattern: bytes, repeats: int, random: object) -> None:
    """Any bytes, from noise to a pattern that repeats, as elements of any width."""
    raw = (pattern * repeats * width)[: len(pattern) * repeats // width * width + width]
    raw = raw[: len(raw) // width * width]
    frame = PACKER.pack(memoryview(raw), width)
    if frame is None:
        return
    assert len(frame) < len(raw)
    assert unpack(segment(frame, len(raw) // width, width), frame) == raw


@pytest.mark.parametrize("width", WIDTHS)
def test_planes_are_what_is_packed(width: int) -> None:
    """All first bytes, then all second ones: the format, checked with zstd alone."""
    raw = bytes(range(width)) * 500
    frame = PACKER.pack(raw, width)
    assert frame is not None
    assert zstandard.ZstdDecompressor().decompress(frame) == b"".join(bytes([at]) * 500 for at in range(width))


def test_noise_is_not_packed() -> None:
    noise = torch.randint(0, 256, (SEGMENT_BYTES_MAX,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert PACKER.pack(noise.numpy().data, 4) is None
    assert PACKER.pack(b"", 4) is None


def bombs() -> dict[str, bytes]:
    """Frames of what a record calls 4,096 bytes."""
    zeros = bytes(64 << 20)
    large = zstandard.ZstdCompressor().compress(zeros)
    right = zstandard.ZstdCompressor().compress(bytes(4096))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(zeros)
    lying = bytearray(zstandard.ZstdCompressor().compress(bytes(70_000)))  # its content size has 4 bytes, after 5 of header
    assert int.from_bytes(lying[5:9], "little") == 70_000
    lying[5:9] = (4096).to_bytes(4, "little")
    return {
        "says more": large,
        "says nothing": silent,
        "says the right size and holds more": bytes(lying),
        "holds less": zstandard.ZstdCompressor().compress(bytes(4095)),
        "two frames": right + right,
        "something after it": right + b"x",
        "cut short": right[:-1],
        "no frame": b"0" * 40,
        "nothing": b"",
    }


@pytest.fixture(scope="module")
def frames() -> dict[str, bytes]:
    return bombs()


@pytest.mark.parametrize(
    "name",
    [
        "says more",
        "says nothing",
        "says the right size and holds more",
        "holds less",
        "two frames",
        "something after it",
        "cut short",
        "no frame",
        "nothing",
    ],
)
def test_a_frame_that_would_give_more_than_its_record_says_is_refused(frames: dict[str, bytes], name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCut, match=r"segment 3 \(param 5:1029, codec raw\+zstd4\) cannot be unpacked"):
            unpack(segment(frames[name], 1024, 4), frames[name])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_record_that_asks_for_more_than_a_segment_is_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(SEGMENT_BYTES_MAX + 4))
    with pytest.raises(DamagedCut, match="cannot be unpacked"):
        unpack(segment(frame, SEGMENT_BYTES_MAX // 4 + 1, 4), frame)


@pytest.mark.parametrize("codec", ["raw+zstd3", "raw+zstd0", "raw+zstd04", "bf16+zstd"])
def test_a_codec_nobody_writes_is_refused(codec: str) -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(4096))
    strange = Segment("param", 0, 1024, codec, 1.0, 0, len(frame), digest(frame))
    if unpacked(codec) == codec:  # not of the form at all: it stays packed, and nobody knows how to widen it
        assert unpack(strange, frame) == frame
    else:
        with pytest.raises(DamagedCut, match="whose elements are not of"):
            unpack(strange, frame)


@pytest.mark.parametrize("value", ["zstd", "zstd:", "zstd:0", "zstd:-5", "zstd:20", "zstd:1.5", "zstd:01", "gzip:3", "yes", ""])
def test_levels_that_there_are_not_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="neither none nor one of zstd:1 to zstd:19"):
        parse("file:///d", {"compress": value})


@pytest.mark.parametrize(("value", "level"), [("none", None), ("zstd:1", 1), ("zstd:19", 19)])
def test_levels(value: str, level: int | None) -> None:
    assert parse(f"file:///d?compress={value}", {}).zstd_level == level


# Whole runs


class Wide(torch.nn.Module):
    """Enough elements that something shrinks, a bf16 and a double parameter, one that travels as value, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(96, 64)
        self.second = torch.nn.Linear(64, 96, bias=False).to(torch.bfloat16)
        self.third = torch.nn.Parameter(torch.randn(40, 96, dtype=torch.float64))
        self.whole = torch.nn.Parameter(torch.randn(50, 50))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3000, dtype=torch.int32))
        self.register_buffer("cache", torch.zeros(50), persistent=False)


class Unknown(torch.optim.Optimizer):
    """No replay is known for it."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 1e-2})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                entry.mul_(0.9).add_(parameter.grad)
                with torch.no_grad():
                    parameter.sub_(entry, alpha=group["lr"])


def iterate(job: Job, n: int) -> None:
    """Gradients that are bf16 values, clipped ones, wide ones, and none at all."""
    model = job.model
    assert isinstance(model, Wide)
    model.first.weight.grad = torch.randn(64, 96).bfloat16().float()
    model.first.bias.grad = torch.randn(64)
    model.second.weight.grad = torch.randn(96, 64).bfloat16()
    model.third.grad = torch.randn(40, 96, dtype=torch.float64) if n % 3 else None
    model.whole.grad = torch.randn(50, 50)
    if n % 2:
        torch.nn.utils.clip_grad_norm_(model.first.weight, 0.5)
    model.seen[n] += n
    for optimizer in job.optimizers.values():
        optimizer.step()


def make(seed: int) -> Job:
    torch.manual_seed(seed)
    model = Wide()
    replayed = torch.optim.AdamW([*model.first.parameters(), model.second.weight, model.third], lr=1e-2)
    return Job(model, {"adamw": replayed, "unknown": Unknown([model.whole])}, iterate)


@pytest.mark.parametrize("level", [1, 19])
def test_restored_equals_live_with_every_payload_packed(tmp_path: Path, level: int) -> None:
    uri, job, options = f"file://{tmp_path}", make(1), {**OPTIONS, "compress": f"zstd:{level}"}
    with opened(uri, job, **options) as ckpt:
        ckpt.restore()
        job.train(ckpt, 0, 14, settle=True)
        assert all(ckpt.inexact(step) == () for step in range(15)) and (ckpt.status().proven or 0) >= 9
        live = job.bits()
    found = logged(tmp_path)
    roles = {role for increment in found.increments.values() for role in payloads(increment).values()}
    assert {"gradient", "value: optimizer"} <= roles
    codecs = Counter(s.codec for increment in found.increments.values() for s in segments(increment))
    assert {"bf16+zstd2", "bf16*k+zstd2", "raw+zstd2", "raw+zstd4", "raw+zstd8"} <= codecs.keys(), codecs
    assert any(s.codec == "raw" for increment in found.increments.values() for s in segments(increment)), "what does not shrink stays"
    assert all(
        s.codec.startswith("raw+") for i in found.increments.values() for r in i.refreshes for s in r.segments if s.stored_bytes > 2000
    )
    assert all(s.codec == "raw" for base in found.bases.values() for s in base.segments)
    assert run_tool(fsck.main, uri, "--read-data").code == 0
    assert restored_bits(uri, make, 14, **options) == live
    assert restored_bits(uri, make, 14, **OPTIONS) == live, "what was packed is read whatever is packed from now on"


def test_packing_stores_less(tmp_path: Path) -> None:
    stored = {}
    for compress in ("none", "zstd:3"):
        job = make(1)
        with opened(f"file://{tmp_path}/{compress.replace(':', '-')}", job, **OPTIONS, compress=compress) as ckpt:
            ckpt.restore()
            job.train(ckpt, 0, 12, settle=True)
            stored[compress] = ckpt.status().payload_bytes
    assert stored["zstd:3"]["opaque"] == stored["none"]["opaque"]
    for payload in ("gradient", "value", "refresh"):
        assert 0.3 * stored["none"][payload] < stored["zstd:3"][payload] < 0.97 * stored["none"][payload]


def test_packed_increments_wait_in_memory_and_go_to_nvme_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVMe stops, and is used again: what waited in memory is written there as it was stored."""
    switch, expected = Switch(), reference(40, width=200)
    monkeypatch.setattr("adacheck.start.LmdbBackend", lambda path: Faulty(LmdbBackend(path), switch))
    process = Process(tmp_path, options={"full_every": 1000, "compress": "zstd:1"}, width=200)
    process.ckpt.restore()
    steps(process, 5)
    switch.error = Full("no room on the test's disk")
    steps(process, 4)
    switch.error = None
    steps(process, 12, until=lambda: not process.ckpt.status().lost_copies)
    assert process.ckpt.status().lost_copies == ()
    process.step(drain=False)
    process.ckpt.drain()
    last = process.ckpt.status().step
    process.abandon()
    found = logged(tmp_path)
    assert any("+zstd" in s.codec for increment in found.increments.values() for s in segments(increment))
    again = Process(tmp_path, width=200)
    assert again.ckpt.restore() == last
    assert not differing(again.run.snapshot(), expected[last])
    again.abandon()


def test_fsck_names_a_frame_that_has_its_digest_and_cannot_be_unpacked() -> None:
    """Nobody writes one; a store made to harm does."""
    content = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    bomb = segment(content, 1024, 4)
    base = Base("run", 1, 0, 7, StateSpec(0, "w", (), "parameter", "optim", True, (), b""), b"", (bomb,))
    with MemoryBackend() as memory:
        memory.put("base/000003", content)
        memory.put("base", b"record")
        look = Look(memory, Tier.NVME, Sample(1.0))
        check_slots(look, CopyRecords(names=["base", "base/000003"], bases={"base": base}, contents={"base": b"record"}))
    assert [(finding.kind, finding.name) for finding in look.findings] == [(Kind.MALFORMED, "base/000003")]
    assert "its frame says 1048576 bytes, the record 4096" in look.findings[0].found


def wide_own(seed: int) -> Job:
    """bf16 parameters whose masters are in their states: values that leave the parameters out."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(96, 64).bfloat16()

    def random(job: Job, n: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        job.optimizer.step()

    return Job(model, {"optim": Own(model.parameters())}, random)


@pytest.mark.parametrize("make", [wide_own, with_masters(each(copy_seen))], ids=["in its state", "elsewhere"])
def test_values_without_their_derived_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Make
) -> None:
    """The digest of a value that leaves tensors out is of raw bytes too."""
    monkeypatch.setitem(OPTIONS, "compress", "zstd:1")
    found = survives(tmp_path, make, caplog)
    assert any("+zstd" in s.codec for increment in found.increments.values() for s in segments(increment))
    derived = {step: len(increment.derived) for step, increment in found.increments.items()}
    rows = {step.row.step: step.row.derived_tensors for step in gather_facts(parse(f"file://{tmp_path}", {})).live}
    assert max(derived.values()) >= 2 and {step: rows[step] for step in derived} == derived

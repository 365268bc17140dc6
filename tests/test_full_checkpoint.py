"""Full checkpoints: what is written is read back bit for bit, by this library and by stock PyTorch, or the damage is named."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from adacheck.backends.base import Backend, Buffer, Parts, Stat, each_part
from adacheck.backends.memory import MemoryBackend
from adacheck.backends.object_store import ObjectStore
from adacheck.capture.opaque import encode
from adacheck.digest import digest
from adacheck.errors import DamagedCut, UnsupportedTensor
from adacheck.full_checkpoint import CutId, StateSource, write_full
from adacheck.full_reader import WINDOW_BYTES, Rows, read_full
from adacheck.manifests import encoding, keys
from adacheck.manifests.record import FullEntry, StateSpec, TensorSpec
from adacheck.opaque_object import opaque_object
from adacheck.safetensors_shard import header_bytes, places
from adacheck.states import State, segment_ranges, tensor_bytes, tensor_spec

CUT = CutId("run-a", 1, 3, 1000)


def state(number: int, fqn: str, tensors: dict[str, torch.Tensor], **changed: object) -> State:
    fields: dict[str, object] = {"aliases": (), "kind": "parameter", "optimizer": "adamw", "requires_grad": True, "scalars": b""}
    specs = tuple(tensor_spec(name, tensor) for name, tensor in tensors.items())
    return State(StateSpec(state=number, fqn=fqn, tensors=specs, **(fields | changed)), tensors, {})  # type: ignore[arg-type]


def source(held: State) -> StateSource:
    def read(name: str) -> Iterator[Buffer]:
        spec = next(tensor for tensor in held.spec.tensors if tensor.name == name)
        whole, itemsize = tensor_bytes(held.tensors[name]), held.tensors[name].dtype.itemsize
        scratch = bytearray(4 << 20)  # reused, as the keeper does
        for start, stop in segment_ranges(spec):
            part = memoryview(scratch)[: (stop - start) * itemsize]
            part[:] = whole[start * itemsize : stop * itemsize]
            yield part

    return StateSource(held.spec, read, held.digest())


def adam(number: int, fqn: str, parameter: torch.Tensor, **changed: object) -> State:
    wide = parameter.float()
    tensors = {"param": parameter, "exp_avg": wide * 2, "exp_avg_sq": wide * wide, "step": torch.tensor(float(number + 7))}
    return state(number, fqn, tensors, **changed)


def model() -> list[State]:
    torch.manual_seed(0)
    return [
        adam(0, "embed.weight", torch.randn(1000, 33).bfloat16(), aliases=("head.weight",), scalars=encode("s", {"n": 3, "t": (1,)})),
        adam(1, "block.weight", torch.randn(3, 5)),
        adam(2, "scale", torch.tensor(2.5)),
        state(3, "nothing", {"param": torch.empty(0, 4)}),
        state(4, "mask", {"param": torch.tensor([True, False, True])}, kind="buffer", optimizer=""),
        state(5, "count", {"param": torch.tensor(12345678901)}, kind="buffer", optimizer=""),
        state(6, "nan", {"param": torch.tensor([math.nan, -0.0, math.inf])}, kind="buffer", optimizer=""),
    ]


def odd_dtypes() -> list[State]:
    """What stock PyTorch cannot be asked to understand, beside what it can."""
    names = ("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint16")
    raw = torch.arange(96, dtype=torch.uint8)
    states = [state(at, f"odd.{name}", {"param": raw.view(getattr(torch, name)).reshape(2, -1)}) for at, name in enumerate(names)]
    states.append(state(len(names), "odd.point", {"param": torch.tensor(1 + 2j)}))
    states.append(state(len(names) + 1, "odd.none", {"param": torch.empty(0, 2, dtype=torch.complex64)}))
    return states


def write(backend: Backend, states: list[State], **changed: object) -> FullEntry:
    opaque = [("rng", encode("rng", {"seed": (1, 2)})), ("extra.loader", b""), ("extra.epoch", encode("e", "4" * 40))]
    return write_full(backend, CUT, [source(held) for held in states], opaque, **changed)  # type: ignore[arg-type]


def equal(left: State, right: State) -> None:
    assert left.spec == right.spec
    for name, tensor in left.tensors.items():
        assert right.tensors[name].dtype == tensor.dtype and right.tensors[name].shape == tensor.shape
        assert bytes(tensor_bytes(right.tensors[name])) == bytes(tensor_bytes(tensor)), (left.spec.fqn, name)


@pytest.mark.parametrize("shard_bytes", [1, 5_000, 150_000, 256 << 20])
def test_what_was_written_is_read(shard_bytes: int) -> None:
    backend, states = MemoryBackend(), model() + [replace_number(held, 7 + at) for at, held in enumerate(odd_dtypes())]
    entry = write(backend, states, shard_bytes=shard_bytes)
    reader = read_full(backend, entry)
    for at, held in enumerate(states):
        equal(held, reader.state(at))
    assert reader.state(0).scalars == {"n": 3, "t": (1,)}
    assert reader.opaque() == {"rng": encode("rng", {"seed": (1, 2)}), "extra.loader": b"", "extra.epoch": encode("e", "4" * 40)}
    assert entry.status == "pending" and entry.finite
    assert entry.size_bytes == sum(stat.size_bytes for key in backend.list("full/") if (stat := backend.stat(key)))
    assert all(keys.parse(key) is not None for key in backend.list("full/"))


def replace_number(held: State, number: int) -> State:
    return State(replace(held.spec, state=number), held.tensors, held.scalars)


def test_shards_have_whole_tensors_their_size_and_digest() -> None:
    backend, states = MemoryBackend(), model()
    entry = write(backend, states, shard_bytes=100_000)
    manifest = read_full(backend, entry).manifest
    assert len(manifest.shards) == 4  # 66,000; 132,000; 132,000; the small rest
    for shard in manifest.shards:
        content = backend.get(f"{entry.folder}/{shard.name}")
        assert (len(content), digest(content)) == (shard.size_bytes, shard.digest)
        assert shard.tensors


def test_safetensors_itself_reads_every_shard_aligned(tmp_path: Path) -> None:
    backend, states = MemoryBackend(), model() + [replace_number(held, 7 + at) for at, held in enumerate(odd_dtypes())]
    entry = write(backend, states)
    manifest = read_full(backend, entry).manifest
    assert [shard.name for shard in manifest.shards] == ["shard-00001-of-00001.safetensors"]
    key = f"{entry.folder}/{manifest.shards[0].name}"
    found = places(backend.get(key, (0, header_bytes(backend.get(key, (0, 8))))))
    for held in manifest.shards[0].tensors:
        assert found[held.key].start % min(states[held.state].tensors[held.tensor].dtype.itemsize, 8) == 0, held.key
    path = tmp_path / "shard.safetensors"
    path.write_bytes(backend.get(f"{entry.folder}/{manifest.shards[0].name}"))
    with safe_open(path, "pt") as file:
        assert "head.weight" in file.metadata()["ADACHECK_ALIASES"]
        for held in manifest.shards[0].tensors:
            original = states[held.state].tensors[held.tensor]
            assert bytes(tensor_bytes(file.get_tensor(held.key).contiguous())) == bytes(tensor_bytes(original)), held.key


STOCK = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
try:
    import adacheck
except ImportError:
    pass
else:
    sys.exit("adacheck can be imported: this proves nothing")
reader = HuggingFaceStorageReader(sys.argv[1])
expected = torch.load(sys.argv[2])
metadata = reader.read_metadata().state_dict_metadata
assert set(metadata) == set(expected), set(metadata) ^ set(expected)
loaded = {key: torch.full(item.size, 77, dtype=item.properties.dtype) for key, item in metadata.items()}
dcp.load(loaded, storage_reader=HuggingFaceStorageReader(sys.argv[1]), no_dist=True)
def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)
for key, tensor in expected.items():
    assert torch.equal(raw(loaded[key]), raw(tensor)), key
    if not key.startswith("model.odd."):
        assert loaded[key].dtype == tensor.dtype and loaded[key].shape == tensor.shape, key
print("equal", len(expected))
"""


def on_disk(folder: Path) -> ObjectStore:
    return ObjectStore(f"file://{folder}")


@pytest.mark.parametrize("shard_bytes", [50_000, 256 << 20])
def test_stock_pytorch_loads_every_tensor(tmp_path: Path, shard_bytes: int) -> None:
    states = model() + [replace_number(held, 7 + at) for at, held in enumerate(odd_dtypes())]
    with on_disk(tmp_path / "store") as backend:
        entry = write(backend, states, shard_bytes=shard_bytes)
        read_all(backend, entry)
    folder = tmp_path / "store" / entry.folder
    expected = {}
    for held in states:
        for name, tensor in held.tensors.items():
            key = f"model.{held.spec.fqn}" if name == "param" else f"optim.state.{held.spec.fqn}.{name}"
            expected[key] = tensor.clone()  # torch.save wants no two dtypes over one memory
    torch.save(expected, tmp_path / "expected.pt")
    # -I: neither this folder nor PYTHONPATH; -S and the one path: no .pth files, through which an editable install is found.
    packages = str(Path(torch.__file__).parent.parent)
    program = f"import sys; sys.path.append({packages!r})\n{STOCK}"
    command = [sys.executable, "-I", "-S", "-c", program, str(folder), str(tmp_path / "expected.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"equal {len(expected)}\n"


def chunk(number: int, rows: tuple[int, int], whole: torch.Tensor, name: str = "w") -> State:
    part = whole[rows[0] : rows[1]].clone()
    held = state(number, name, {"param": part})
    spec = TensorSpec("param", "float32", tuple(part.shape), tuple(whole.shape), (rows[0], *(0 for _ in whole.shape[1:])))
    return State(replace(held.spec, tensors=(spec,)), held.tensors, {})


def test_chunks_of_one_tensor_tile_it_for_stock_readers_too(tmp_path: Path) -> None:
    whole = torch.arange(30, dtype=torch.float32).reshape(10, 3)
    # The third has no rows and the offset of the fourth: in a file it would shadow it.
    states = [chunk(0, (0, 4), whole), chunk(1, (4, 5), whole), chunk(2, (5, 5), whole), chunk(3, (5, 10), whole)]
    with on_disk(tmp_path) as backend:
        entry = write(backend, states)
        reader = read_full(backend, entry)
        for at, held in enumerate(states):
            equal(held, reader.state(at))
    loaded = {"model.w": torch.zeros(10, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch remarks that torch.distributed is not initialised
        load(loaded, storage_reader=HuggingFaceStorageReader(str(tmp_path / entry.folder)), no_dist=True)
    assert torch.equal(loaded["model.w"], whole)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 4), (5, 10)], "cover 27 of 30 elements"),
        ([(0, 6), (5, 10)], "overlap"),
        ([(0, 10), (0, 10)], "overlap"),
        ([(0, 9)], "cover 27 of 30"),
    ],
)
def test_chunks_that_do_not_tile_are_refused_before_a_byte_is_written(rows: list[tuple[int, int]], message: str) -> None:
    whole, backend = torch.zeros(10, 3), MemoryBackend()
    with pytest.raises(DamagedCut, match=f"model.w: .*{message}"):
        write(backend, [chunk(at, pair, whole) for at, pair in enumerate(rows)])
    assert list(backend.list("")) == []


def test_several_optimizers_are_part_of_the_keys() -> None:
    states = [adam(0, "a", torch.ones(2), optimizer="muon"), adam(1, "b", torch.ones(2), optimizer="adamw")]
    backend = MemoryBackend()
    listed = {held.key for shard in read_full(backend, write(backend, states)).manifest.shards for held in shard.tensors}
    assert {"optim.muon.state.a.exp_avg", "optim.adamw.state.b.step", "model.a", "model.b"} <= listed


def test_finite_is_about_parameters_only() -> None:
    assert write(MemoryBackend(), model()).finite  # its buffer "nan" is none of the parameters
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for bad in (math.nan, math.inf, -math.inf):
            parameter = torch.ones(100, dtype=dtype)
            assert write(MemoryBackend(), [state(0, "w", {"param": parameter})]).finite
            parameter[99] = bad
            assert not write(MemoryBackend(), [state(0, "w", {"param": parameter})]).finite


def read_all(backend: Backend, entry: FullEntry) -> None:
    reader = read_full(backend, entry)
    for at in range(len(reader.manifest.states)):
        reader.state(at)
    reader.opaque()


@pytest.mark.parametrize(
    "how", ["missing", "zero length", "short by one", "five bytes", "another object", "flip inside", "flip at the end"]
)
def test_every_damaged_object_is_found_and_named(how: str) -> None:
    backend = MemoryBackend()
    entry = write(backend, model(), shard_bytes=100_000)
    read_all(backend, entry)
    found = list(backend.list(entry.folder))
    assert len(found) == 6
    for key in found:
        whole = backend.get(key)
        # 20 bytes before the end are content in every object; what is framing is left to the test of header bytes.
        middle, end = len(whole) - 20, len(whole) - 1
        content = {
            "missing": None,
            "zero length": b"",
            "short by one": whole[:-1],
            "five bytes": whole[:5],
            "another object": backend.get(found[0] if key != found[0] else found[1]),
            "flip inside": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "flip at the end": whole[:end] + bytes([whole[end] ^ 1]),
        }[how]
        backend.delete(key)
        if content is not None:
            backend.put(key, content)
        with pytest.raises(DamagedCut, match=key.rsplit("/", 1)[1]):
            read_all(backend, entry)
        backend.put(key, whole)
    read_all(backend, entry)


def test_a_flip_of_any_header_byte_never_gives_other_tensors() -> None:
    backend, states = MemoryBackend(), [adam(0, "w", torch.randn(4)), adam(1, "v", torch.randn(4))]
    entry = write(backend, states)
    key = f"{entry.folder}/shard-00001-of-00001.safetensors"
    whole = backend.get(key)
    for at in range(len(whole)):
        backend.put(key, whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        reader = read_full(backend, entry)
        for number, held in enumerate(states):
            try:
                equal(held, reader.state(number))
            except DamagedCut as error:
                assert key in str(error)


def rewritten(backend: Backend, entry: FullEntry, **changed: object) -> FullEntry:
    """The entry with a consistent manifest that says something else."""
    manifest = replace(read_full(backend, entry).manifest, **changed)  # type: ignore[arg-type]
    content = encoding.encode(manifest)
    backend.put(keys.manifest(entry.folder), content)
    return replace(entry, manifest_digest=digest(content))


def test_a_manifest_whose_shards_do_not_hold_everything_is_refused() -> None:
    backend = MemoryBackend()
    entry = write(backend, model(), shard_bytes=100_000)
    manifest = read_full(backend, entry).manifest
    first, second, *rest = manifest.shards
    both = replace(second, size_bytes=first.size_bytes + second.size_bytes, tensors=(*second.tensors, *first.tensors))
    cases: dict[str, dict[str, object]] = {
        "in no shard": {"shards": (second, *rest)},
        "listed twice": {"shards": (first, both, *rest)},
        "is not tensor": {"shards": (replace(first, tensors=(replace(first.tensors[0], state=1), *first.tensors[1:])), second, *rest)},
        "is not that of its tensors": {"digests": (bytes(32), *manifest.digests[1:])},
        "is of step 9": {"step": 9},
    }
    for message, changed in cases.items():
        with pytest.raises(DamagedCut, match=message):
            read_full(backend, rewritten(backend, entry, **changed))
        backend.put(keys.manifest(entry.folder), encoding.encode(manifest))


def test_chunks_missing_from_the_manifest_are_found() -> None:
    whole, backend = torch.zeros(10, 3), MemoryBackend()
    entry = write(backend, [chunk(0, (0, 4), whole), chunk(1, (4, 10), whole)])
    manifest = read_full(backend, entry).manifest
    kept = tuple(replace(shard, tensors=tuple(h for h in shard.tensors if h.state == 0)) for shard in manifest.shards)
    kept = tuple(shard for shard in kept if shard.tensors)
    with pytest.raises(DamagedCut, match="cover 12 of 30 elements"):
        read_full(backend, rewritten(backend, entry, states=manifest.states[:1], digests=manifest.digests[:1], shards=kept))


@pytest.mark.parametrize("segment", [b"\0" * 8, b"\0" * 16, b""])
def test_a_source_with_other_bytes_than_its_spec_is_refused(segment: bytes) -> None:
    held = state(0, "w", {"param": torch.zeros(3)})
    backend = MemoryBackend()
    with pytest.raises(DamagedCut, match=r"model\.w"):
        write_full(backend, CUT, [StateSource(held.spec, lambda name: [segment])], [])
    assert keys.manifest("x").rsplit("/", 1)[1] not in "".join(backend.list(""))


def test_a_source_whose_bytes_are_not_those_of_its_record_leaves_no_manifest() -> None:
    held, backend = adam(0, "w", torch.randn(4)), MemoryBackend()
    right = source(held)
    held.tensors["exp_avg"][2] += 1
    with pytest.raises(DamagedCut, match="state w at step 1000 has digest"):
        write_full(backend, CUT, [right], [])
    assert not [key for key in backend.list("") if key.endswith("manifest.msgpack")]


class Flaky(MemoryBackend):
    """Takes half of the first object, and then everything from the start, as a retried upload does."""

    def put(self, key: str, parts: Parts, *, exclusive: bool = False):  # type: ignore[no-untyped-def]
        if not isinstance(parts, bytes):
            taken = iter(parts)
            next(taken), next(taken)
        return super().put(key, parts, exclusive=exclusive)


class Losing(MemoryBackend):
    """Says it stored an object, and stored less."""

    def put(self, key: str, parts: Parts, *, exclusive: bool = False):  # type: ignore[no-untyped-def]
        whole = parts if isinstance(parts, bytes) else b"".join(bytes(part) for part in parts)
        return super().put(key, whole[:-1], exclusive=exclusive)


def test_a_shard_can_be_streamed_again() -> None:
    backend, states = Flaky(), model()
    read_all(backend, write(backend, states))


def test_an_upload_that_lost_bytes_is_an_error() -> None:
    with pytest.raises(DamagedCut, match=r"shard-00001.*must be tried again"):
        write(Losing(), model())


def test_manifest_is_written_last() -> None:
    order: list[str] = []

    class Noting(MemoryBackend):
        def put(self, key: str, parts: Parts, *, exclusive: bool = False):  # type: ignore[no-untyped-def]
            order.append(key.rsplit("/", 1)[1])
            return super().put(key, parts, exclusive=exclusive)

    write(Noting(), model(), shard_bytes=100_000)
    assert order[-2:] == ["opaque.msgpack", "manifest.msgpack"] and all(name.startswith("shard-") for name in order[:-2])


class Counting(MemoryBackend):
    """Counts the bytes that are read of shards."""

    read_bytes = 0

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        content = super().get(key, byte_range)
        self.read_bytes += len(content) if key.endswith(".safetensors") else 0
        return content


def test_rows_are_read_and_checked_without_the_rest_of_their_tensor() -> None:
    whole = torch.arange(12 << 20, dtype=torch.float32).reshape(-1, 1 << 10)  # 48 MiB: 12 segments, 6 windows
    backend = Counting()
    entry = write(backend, [state(0, "w", {"param": whole}), state(1, "point", {"param": torch.tensor(3.0)})])
    reader = read_full(backend, entry)
    for start, stop in ((0, 1), (5000, 5001), (2047, 2050), (12287, 12288), (0, 0)):
        assert torch.equal(reader.rows(0, Rows("param", start, stop)), whole[start:stop])
    assert backend.read_bytes < 5 * WINDOW_BYTES + 1000, "one window for each segment, and the header"
    assert reader.rows(1, Rows("param", 0, 1)) == 3.0
    key = f"{entry.folder}/shard-00001-of-00001.safetensors"
    content = bytearray(backend.get(key))
    content[len(content) // 2 + (1 << 20)] ^= 1
    backend.put(key, bytes(content))
    reader = read_full(backend, entry)
    assert torch.equal(reader.rows(0, Rows("param", 0, 4096)), whole[:4096])
    with pytest.raises(DamagedCut, match=r"shard-00001-of-00001.* bytes 25165824:29360128 of model\.w"):
        reader.rows(0, Rows("param", 6150, 6151))


class FlippingOnce(MemoryBackend):
    """Gives each range of bytes with one bit changed the first time it is asked for, as a bad network card would."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, object]] = set()

    def get(self, key: str, byte_range: tuple[int, int] | None = None) -> bytes:
        content = super().get(key, byte_range)
        if (key, byte_range) in self.seen:
            return content
        self.seen.add((key, byte_range))
        return content[:-1] + bytes([content[-1] ^ 1])


def test_bytes_that_change_on_the_way_are_read_again() -> None:
    backend, states = FlippingOnce(), model()
    entry = write(backend, states, shard_bytes=50_000)
    reader = read_full(backend, entry)
    for at, held in enumerate(states):
        equal(held, reader.state(at))
    assert set(reader.opaque()) == {"rng", "extra.loader", "extra.epoch"}


def test_opaque_object_is_one_msgpack_map() -> None:
    content, segments = opaque_object([("a", b"xyz"), ("b", b"")])
    assert msgpack.unpackb(content) == {"a": b"xyz", "b": b""}
    assert [content[segment.start : segment.stop] for segment in segments] == [b"xyz", b""]
    with pytest.raises(ValueError, match="different names"):
        opaque_object([("a", b""), ("a", b"")])


def test_unknown_dtype_is_refused_by_name() -> None:
    spec = StateSpec(0, "w", (), "parameter", "", True, (TensorSpec("param", "float3", (1,), (1,), (0,)),), b"")
    with pytest.raises(UnsupportedTensor, match="float3"):
        write_full(MemoryBackend(), CUT, [StateSource(spec, lambda name: [b"x"])], [])


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Discarding(MemoryBackend):
    """Keeps sizes only, and notes the most memory the process had while it was written to."""

    peak = 0

    def put(self, key: str, parts: Parts, *, exclusive: bool = False):  # type: ignore[no-untyped-def]
        size = 0
        for part in each_part(parts):
            size += len(part)
            self.peak = max(self.peak, rss_bytes())
        self._sizes = getattr(self, "_sizes", {}) | {key: size}
        return super().put(key, b"")

    def stat(self, key: str) -> Stat | None:
        return Stat(self._sizes[key], 0.0)


def test_writing_200_mb_takes_the_memory_of_a_few_segments() -> None:
    segment = bytearray(4 << 20)
    spec = StateSpec(0, "w", (), "parameter", "", True, (tensor_spec("param", torch.empty(50 << 20, device="meta")),), b"")
    backend = Discarding()
    write_full(backend, CUT, [StateSource(spec, lambda name: [memoryview(segment)[: 1 << 20]])][:0], [])
    before = rss_bytes()
    entry = write_full(backend, CUT, [StateSource(spec, lambda name: (segment for _ in range(50)))], [])
    assert entry.size_bytes > 200 << 20
    assert backend.peak - before < 40 << 20


def test_reading_holds_one_tensor_and_the_windows() -> None:
    size, count = 12 << 20, 16
    states = [state(at, f"w{at}", {"param": torch.full((size // 4,), at, dtype=torch.float32)}) for at in range(count)]
    backend = MemoryBackend()
    reader = read_full(backend, write(backend, states))
    del states
    before, peak = rss_bytes(), 0
    for at in range(count):
        tensor = reader.tensor(at, "param")
        assert float(tensor[-1]) == at
        peak = max(peak, rss_bytes())
        del tensor
    assert peak - before < 2 * size + 5 * WINDOW_BYTES  # of 192 MiB

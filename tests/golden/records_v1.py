"""One record of each kind with fixed content, as format version 1 writes it: the values behind `v1/records/*.bin`.

`python -m tests.golden.records_v1` adds the file of a kind that has none. It never writes over one: those bytes are in stores.
"""

from __future__ import annotations

from pathlib import Path

from adacheck.manifests.chain import append, genesis, seal_version
from adacheck.manifests.encoding import encode
from adacheck.manifests.record import (
    Base,
    Certificate,
    Chain,
    Derived,
    Event,
    Fork,
    Full,
    FullEntry,
    Gradient,
    Group,
    HistoryChunk,
    Incarnation,
    Increment,
    Kernel,
    Record,
    Refresh,
    Run,
    Segment,
    Shard,
    ShardTensor,
    StateSpec,
    TensorSpec,
    Value,
    Version,
)

FOLDER = Path(__file__).parent / "v1" / "records"
RUN = "6a7c1d5e-8f10-4c2b-9a3d-0123456789ab"

_KERNEL = Kernel("torch.optim.adamw.AdamW", "fused", ("amsgrad=False", "maximize=False"), "cpu", "2.13.0+cpu", "AVX512", 1, False)
_WEIGHT = StateSpec(
    0,
    "blöcke.0.weight",
    ("head.weight",),
    "parameter",
    "optim",
    True,
    (
        TensorSpec("param", "bfloat16", (4, 8), (8, 8), (4, 0)),
        TensorSpec("exp_avg", "float32", (4, 8), (8, 8), (4, 0)),
        TensorSpec("step", "float32", (), (), ()),
    ),
    b"\x80",
)
_BUFFER = StateSpec(3, "norm.running_mean", (), "buffer", "", False, (TensorSpec("param", "float32", (0,), (0,), (0,)),), b"")
_CERTIFICATE = Certificate(_KERNEL, (0, 1), (2,))


def _segment(tensor: str, slot: int, codec: str = "raw", coefficient: float = 1.0) -> Segment:
    return Segment(tensor, 32 * slot, 32 * slot + 32, codec, coefficient, slot, 64, bytes(range(slot, slot + 32)))


INCREMENT = Increment(
    run=RUN,
    generation=1,
    incarnation=3,
    chain=0,
    step=1_000_001,
    events=(Event("optim", _KERNEL, (Group((0, 1), b"\x81\xa2lr\xcb\x3f\x50\x62\x4d\xd2\xf1\xa9\xfc"),)),),
    gradients=(
        Gradient(0, 0, "float32", (_segment("grad", 0, "bf16"), _segment("grad", 1, "bf16*k", 0.12345678955316544))),
        Gradient(1, 0, "bfloat16", (_segment("grad", 2, coefficient=-0.0), _segment("grad", 6, "bf16+zstd2"))),
    ),
    values=(Value(_BUFFER, bytes(32), True, "buffer", ()), Value(_WEIGHT, bytes(range(32)), False, "certify", (_segment("param", 3),))),
    derived=(Derived(2, "param", 1, "param"),),
    refreshes=(Refresh(0, (_segment("exp_avg", 4),)),),
    removed=(7, 300, 70_000),
    opaque=(_segment("rng", 5),),
)

GOLDEN: dict[str, Record] = {
    "run": Run(RUN, 1_760_000_000.25, "adacheck 0.1.0"),
    "incarnation": Incarnation(RUN, 3, 1_760_000_100.5, "node-17", 4_194_304, "/mnt/nvme0/adacheck"),
    "fork": Fork(RUN, 3, 1_000_000, True),
    "version": seal_version(
        Version(
            RUN,
            3,
            12,
            (
                FullEntry(2, 999_000, "full/i00000002/step-000000999000-0c1d", bytes(range(32)), 5_000_000_000, "proven"),
                FullEntry(3, 1_000_000, "full/i00000003/step-000001000000-9f3e", bytes(32), 0, "pending", False),
            ),
            bytes(range(100, 132)),
            b"",
        )
    ),
    "full": Full(
        RUN,
        1,
        3,
        1_000_000,
        (_WEIGHT, _BUFFER),
        (bytes(range(32)), bytes(32)),
        (Shard("shard-00001-of-00001.safetensors", 512, bytes(32), (ShardTensor("model.w", 0, "param", (bytes(32),)),)),),
        (_segment("rng", 0),),
        (_segment("history", 0),),
        (_CERTIFICATE,),
    ),
    "chain": Chain(RUN, 1, 0, 3, 3, 999_968, bytes(range(200, 232)), (0, 7), (999_970, 999_968), (_CERTIFICATE,)),
    "base": Base(RUN, 1, 0, 999_968, _WEIGHT, bytes(range(32)), (_segment("param", 0), _segment("exp_avg", 1))),
    "increment": INCREMENT,
    "linked": append(INCREMENT, genesis(RUN, 1, 0)),
    "history_chunk": HistoryChunk(
        RUN,
        3,
        31_250,
        (1_000_001,),
        (1_760_000_200.75,),
        (200_000_000,),
        (0,),
        (0,),
        (12_000_000,),
        (70_000,),
        (14_500,),
        (1_000_000,),
        (1_000_000,),
        (1_000_000,),
        (-1,),
    ),
}


def main() -> None:
    """Write the files that are not there yet."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, record in GOLDEN.items():
        path = FOLDER / f"{name}.bin"
        if not path.exists():
            path.write_bytes(encode(record))


if __name__ == "__main__":
    main()

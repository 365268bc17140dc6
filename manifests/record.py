"""The records of a store, as frozen values: what an increment, a base, a full checkpoint, a version and a fork say.

Only plain types (int, str, bytes, bool, float, tuples of them, and each other), so that `encoding.py` can write every record in
one way and `adacheck-fsck` can read them without torch. Sizes are bytes, steps count calls of `ckpt.step()`.
"""

from __future__ import annotations

from dataclasses import dataclass

DIGEST_BYTES = 32
"""Length of every digest and link: BLAKE3-256."""

STATE_KINDS = ("parameter", "buffer", "transient")
"""Every `StateSpec.kind`."""

SEGMENT_BYTES_MAX = 4 << 20
"""Most raw (not narrowed) bytes of one segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of one tensor in one increment or base, with its own codec and digest.

    Attributes:
        tensor: name within the state: `param`, `grad`, or the optimizer's key (`exp_avg`, `step`); for opaque bytes the item's name.
        start, stop: half-open range of elements of the tensor, flattened in row-major order (bytes, for opaque items).
        codec: `raw`; `bf16`, an fp32 range whose low halves are zero, sent as its high halves; `bf16*k`, an fp32 range c whose
            every element is float(u)*k for a bf16 u: u is sent. `k` is `coefficient`.
        coefficient: the fp32 k of `bf16*k` as a Python float; 1.0 for other codecs.
        slot: number of the object that holds the bytes, unique within its increment, base or full checkpoint.
        stored_bytes: length of that object.
        digest: BLAKE3-256 of that object.
    """

    tensor: str
    start: int
    stop: int
    codec: str
    coefficient: float
    slot: int
    stored_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a state as this rank holds it: a chunk of the global tensor.

    `dtype` is torch's name without the prefix (`bfloat16`); `shape` is the chunk's, `offsets` where it sits in `global_shape`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A parameter with its optimizer tensors, or a buffer: everything but the bytes.

    Attributes:
        state: number of the state in its chain; it never changes meaning within a generation.
        fqn: first name in the model (`blocks.0.mlp.weight`), or `<optimizer>.<group>.<index>` outside of it.
        aliases: further names of the same tensor (tied parameters).
        kind: one of `STATE_KINDS`; a `transient` one is a buffer that `state_dict()` leaves out.
        optimizer: name of the optimizer that owns it, `""` for none.
        requires_grad: of the parameter, when this was shipped.
        tensors: `param` first, then the optimizer's tensors sorted by name.
        scalars: msgpack of the optimizer's entries that are no tensors (numbers, `None`, containers), `b""` for none.
    """

    state: int
    fqn: str
    aliases: tuple[str, ...]
    kind: str
    optimizer: str
    requires_grad: bool
    tensors: tuple[TensorSpec, ...]
    scalars: bytes


@dataclass(frozen=True, slots=True)
class Kernel:
    """Everything that decides the bits an optimizer step computes ("same kernel"), besides hyperparameters and inputs.

    Attributes:
        optimizer_class: dotted name, `torch.optim.adamw.AdamW`.
        implementation: `fused`, `foreach`, `loop`, or `default` where the class chooses itself.
        flags: sorted `name=value` pairs of the class's switches (`amsgrad=False`, `momentum=nonzero`), and of what else it depends on.
        device: `cpu`, or the accelerator's name.
        torch_build: version and build of torch.
        cpu_capability: `torch.backends.cpu.get_cpu_capability()`; `AVX2` and `AVX512` agree bit for bit and are recorded as found.
        threads: intra-op threads of the thread that stepped.
        flush_denormal: whether denormal results were flushed to zero.
    """

    optimizer_class: str
    implementation: str
    flags: tuple[str, ...]
    device: str
    torch_build: str
    cpu_capability: str
    threads: int
    flush_denormal: bool


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter group at an event: its states in order, and msgpack of all its hyperparameters as the step used them.

    Attributes of the optimizer itself that the step reads are among them, as `optimizer.NAME`.
    """

    states: tuple[int, ...]
    hyperparameters: bytes


@dataclass(frozen=True, slots=True)
class Event:
    """One call of an optimizer's `step`, in the order they happened. States without a gradient are absent from `Increment.gradients`."""

    optimizer: str
    kernel: Kernel
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient that event number `event` of the increment was given for one state; its dtype may differ from the parameter's."""

    state: int
    event: int
    dtype: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A state shipped whole. It overrides every gradient of the same increment.

    Attributes:
        spec: what the state is from this step on.
        digest: `value_digest` of all its bytes but those of derived tensors (see FORMAT.md), also where they are left out.
        unchanged: the bytes are those of the preceding increment's value of this state, and are left out; `segments` is empty.
        reason: why it went whole, one word for reports: `first`, `certify`, `optimizer`, `write`, `drift`, `buffer`, `frozen`, ...
    """

    spec: StateSpec
    digest: bytes
    unchanged: bool
    reason: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor that is not sent: it equals the cast of another one, after the step, to its own dtype, NaNs excluded.

    The source has the same shape, a wider floating dtype, and is not derived itself in this increment. Either both are tensors of
    one state (which leaves this tensor out of its `Value` of the same increment), or `tensor` is all that `state` consists of.
    """

    state: int
    tensor: str
    from_state: int
    from_tensor: str


@dataclass(frozen=True, slots=True)
class Refresh:
    """Ranges of a state as the trainer held them after this step, to compare with the shadow."""

    state: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Increment:
    """What one chain adds at one step: all that is needed to go from the cut at `step - 1` to the cut at `step`.

    A state that is in none of the tuples did not change. `removed` states exist no more from this step on.
    `opaque` holds RNG, scheduler, loader, `extra`, and the hyperparameters a restore puts back; complete at every step.
    """

    run: str
    generation: int
    incarnation: int
    chain: int
    step: int
    events: tuple[Event, ...]
    gradients: tuple[Gradient, ...]
    values: tuple[Value, ...]
    derived: tuple[Derived, ...]
    refreshes: tuple[Refresh, ...]
    removed: tuple[int, ...]
    opaque: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Linked:
    """An increment as stored: its encoded record, and the links before and after it: `link = BLAKE3(previous ‖ entry)`."""

    entry: bytes
    previous: bytes
    link: bytes


@dataclass(frozen=True, slots=True)
class Base:
    """A complete value of one state at one step, on NVMe."""

    run: str
    generation: int
    chain: int
    step: int
    spec: StateSpec
    digest: bytes
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """Replay of these states under this kernel was found equal bit for bit; `denied` states under it go as `value` for good."""

    kernel: Kernel
    states: tuple[int, ...]
    denied: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Head record of one copy of a chain on NVMe.

    Attributes:
        incarnation: last one that wrote here.
        fence: incarnations below it are refused.
        anchor_step, anchor_link: the last increment that was pruned, and its link: what the first kept entry links to.
        base_states, base_steps: every base there is, as pairs in the order of the states: one that is missing is missed.
        certificates: what need not be proven again after a restart with the same kernel.
    """

    run: str
    generation: int
    chain: int
    incarnation: int
    fence: int
    anchor_step: int
    anchor_link: bytes
    base_states: tuple[int, ...]
    base_steps: tuple[int, ...]
    certificates: tuple[Certificate, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A run's identity, put exclusively once: `run` is a UUID."""

    run: str
    created_unix_s: float
    software: str


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One start of a run, taken by an exclusive put of its number. `nvme`: the directory of its log on its host, `""` without one."""

    run: str
    incarnation: int
    started_unix_s: float
    host: str
    pid: int
    nvme: str


@dataclass(frozen=True, slots=True)
class Fork:
    """The cut an incarnation started from: immutable, written before any copy is touched. `proven` as it was at that time."""

    run: str
    incarnation: int
    cut: int
    proven: bool


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """One tensor in a shard: `key` in the file, `state` as a position in `Full.states`, and the digest of each canonical segment."""

    key: str
    state: int
    tensor: str
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of a full checkpoint; `name` is relative to the checkpoint's folder, `digest` of the whole file."""

    name: str
    size_bytes: int
    digest: bytes
    tensors: tuple[ShardTensor, ...]


@dataclass(frozen=True, slots=True)
class Full:
    """Manifest of a full checkpoint: every byte of the cut at `step`. `opaque` is the object beside it, in one segment an item.

    `history` is one segment for the copy of the run's history, or none; no restore needs it.
    """

    run: str
    generation: int
    incarnation: int
    step: int
    states: tuple[StateSpec, ...]
    digests: tuple[bytes, ...]
    shards: tuple[Shard, ...]
    opaque: tuple[Segment, ...]
    history: tuple[Segment, ...]
    certificates: tuple[Certificate, ...]


@dataclass(frozen=True, slots=True)
class FullEntry:
    """A full checkpoint as a version lists it: where it is, and whether it is proven yet.

    `status`: `pending` (its proof is still to come), `proven`, or `inexact` (a later comparison found drift in it).
    `manifest_digest` is that of the encoded `Full` record. `finite`: no parameter held a NaN or an infinity.
    """

    incarnation: int
    step: int
    folder: str
    manifest_digest: bytes
    size_bytes: int
    status: str
    finite: bool = True


@dataclass(frozen=True, slots=True)
class Version:
    """An immutable list of the restorable full checkpoints; the newest version of the newest incarnation is the head.

    `previous` is the link of the version before it (zeros for the first), `link = BLAKE3(previous ‖ the other fields, encoded)`.
    """

    run: str
    incarnation: int
    number: int
    fulls: tuple[FullEntry, ...]
    previous: bytes
    link: bytes


@dataclass(frozen=True, slots=True)
class HistoryChunk:
    """What is remembered of some steps of one incarnation after they have left the log, for reports: a column for each figure.

    All columns are equally long; row i of each is of `steps[i]`. The figures are those that `adacheck.history.Row` explains.
    """

    run: str
    incarnation: int
    number: int
    steps: tuple[int, ...]
    unix_s: tuple[float, ...]
    gradient_bytes: tuple[int, ...]
    value_bytes: tuple[int, ...]
    derived_tensors: tuple[int, ...]
    refresh_bytes: tuple[int, ...]
    opaque_bytes: tuple[int, ...]
    blocked_us: tuple[int, ...]
    acked: tuple[int, ...]
    committed: tuple[int, ...]
    durable: tuple[int, ...]
    proven: tuple[int, ...]


Record = Linked | Increment | Base | Chain | Run | Incarnation | Fork | Full | Version | HistoryChunk
"""Every record that is stored as an object of its own (an `Increment` inside its `Linked`)."""

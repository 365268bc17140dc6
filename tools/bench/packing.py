"""What `compress=zstd:LEVEL` gains on the benchmark model's own tensors, and at what rate: on one thread, as the keeper does it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from adacheck.keeper.narrow import RAW, Narrower
from adacheck.manifests.record import Segment
from adacheck.planes import Packer, packed, unpack
from adacheck.states import dtype_name, segment_ranges, tensor_bytes, tensor_spec
from adacheck.tools.training import JobConfig, TrainingJob

LEVELS = (1, 3)
SAMPLE_BYTES = 100 << 20
"""About so much of each kind is packed: every so-many-th segment."""

TRAINED_STEPS = 3
BATCH_MAX = 8

Stored = list[tuple[bytes, str, int]]
"""Segments as they are without packing: bytes, codec, and bytes of an element."""


@dataclass(frozen=True, slots=True)
class Packing:
    """One kind of bytes at one level; rates are of unpacked bytes, in and out, in GB a second of CPU."""

    kind: str
    level: int
    raw_bytes: int
    unpacked_bytes: int
    packed_bytes: int
    pack_gb_per_s: float
    unpack_gb_per_s: float

    @property
    def ratio(self) -> float:
        """What is stored, over what would be without packing."""
        return self.packed_bytes / self.unpacked_bytes


def measure_packing(config: JobConfig) -> list[Packing]:
    """Every kind at every level. Call it in a fresh process."""
    torch.set_num_threads(1)
    return [_measure(kind, level, stored) for kind, stored in _kinds(config) for level in LEVELS]


def _kinds(config: JobConfig) -> Iterator[tuple[str, Stored]]:
    job = TrainingJob(replace(config, batch=min(config.batch, BATCH_MAX)))
    for _ in range(TRAINED_STEPS):
        job.train_one_step()
    gradients = _gradients(job, autocast=True)
    yield "gradient, autocast", _stored(gradients)
    coefficient = torch.nn.utils.get_total_norm(gradients).reciprocal() / 2
    for gradient in gradients:
        gradient.mul_(coefficient)  # as `clip_grad_norm_` does
    yield "gradient, autocast, clipped", _stored(gradients, float(coefficient))
    yield "gradient, fp32", _stored(_gradients(job, autocast=False))
    parameters = list(job.model.parameters())
    yield "refresh and value: parameters", _stored([p.detach() for p in parameters], narrow=False)
    for entry in ("exp_avg", "exp_avg_sq"):
        yield f"refresh and value: {entry}", _stored([job.optimizer.state[p][entry] for p in parameters], narrow=False)


def _gradients(job: TrainingJob, *, autocast: bool) -> list[torch.Tensor]:
    windows = job.loader.next_batch()
    job.optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = job.model(windows[:, :-1])
    functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in job.model.parameters() if parameter.grad is not None]


def _stored(tensors: list[torch.Tensor], coefficient: float | None = None, *, narrow: bool = True) -> Stored:
    """Segments of the tensors, evenly sampled, narrowed as a gradient's are."""
    narrower, found = Narrower(), list[tuple[bytes, str, int]]()
    ranges = [(tensor, start, stop) for tensor in tensors for start, stop in segment_ranges(tensor_spec("grad", tensor))]
    every = -(-sum(tensor.numel() * tensor.element_size() for tensor in tensors) // SAMPLE_BYTES)
    for tensor, start, stop in ranges[::every]:
        size = tensor.element_size()
        part = tensor_bytes(tensor)[start * size : stop * size]
        narrowed = narrower.narrow(part, dtype_name(tensor.dtype) if narrow else "", coefficient)
        found.append((bytes(narrowed.stored), narrowed.codec, size if narrowed.codec == RAW else 2))
    return found


def _measure(kind: str, level: int, stored: Stored) -> Packing:
    packer = Packer(level)
    packer.pack(stored[0][0], stored[0][2])
    begun = time.thread_time()
    frames = [packer.pack(content, width) for content, _, width in stored]
    pack_s = time.thread_time() - begun
    pairs = [
        (Segment("", 0, len(content) // width, packed(codec, width), 1.0, 0, len(frame), b""), frame)
        for (content, codec, width), frame in zip(stored, frames, strict=True)
        if frame is not None
    ]
    begun = time.thread_time()
    for segment, frame in pairs:
        unpack(segment, frame)
    unpack_s = time.thread_time() - begun
    unpacked_bytes = sum(len(content) for content, _, _ in stored)
    packed_bytes = sum(len(content) if frame is None else len(frame) for (content, _, _), frame in zip(stored, frames, strict=True))
    raw_bytes = sum(len(content) * (1 if codec == RAW else 2) for content, codec, _ in stored)
    gone = sum((segment.stop - segment.start) * int(segment.codec[-1]) for segment, _ in pairs)
    return Packing(kind, level, raw_bytes, unpacked_bytes, packed_bytes, unpacked_bytes / pack_s / 1e9, gone / max(unpack_s, 1e-9) / 1e9)

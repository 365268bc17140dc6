"""Narrowing loses no bit, finds all that can be narrowed, and says so only where it widens back exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adacheck.keeper.narrow import Narrower, widen
from adacheck.states import tensor_bytes
from adacheck.threads import arithmetic

COEFFICIENT = float(np.float32(0.43728619))


def through(raw: bytes, coefficient: float | None = None, *, flush: bool = False) -> tuple[str, int, bytes]:
    """Codec and stored size of one fp32 segment, and its bytes after narrowing and widening (the latter in the given denormal mode)."""
    narrowed = Narrower().narrow(memoryview(raw), "float32", coefficient)
    stored = bytes(narrowed.stored)
    out = torch.full((len(raw) // 4,), 7.0, dtype=torch.float32)
    with arithmetic(flush_denormal=flush):
        widen(stored, narrowed.codec, narrowed.coefficient, out)
    return narrowed.codec, len(stored), bytes(tensor_bytes(out))


def test_every_bf16_pattern_travels_as_bf16() -> None:
    raw = (np.arange(65536, dtype=np.uint32) << 16).tobytes()
    for flush in (False, True):
        assert through(raw, flush=flush) == ("bf16", 2 * 65536, raw)


@given(hnp.arrays(np.uint32, st.integers(1, 3000), elements=st.integers(0, 2**32 - 1)), st.booleans(), st.booleans())
def test_any_bits_come_back(patterns: np.ndarray, low_zero: bool, flush: bool) -> None:
    raw = (patterns & np.uint32(0xFFFF0000) if low_zero else patterns).tobytes()
    codec, _, back = through(raw, COEFFICIENT, flush=flush)
    assert back == raw
    if low_zero:
        assert codec == "bf16"


@given(
    hnp.arrays(np.uint16, st.integers(1, 3000), elements=st.integers(0, 2**16 - 1)),
    st.floats(2.0**-20, 1.0, width=32, exclude_max=True),
    st.booleans(),
)
def test_clipped_bf16_patterns_come_back_whatever_they_are(halves: np.ndarray, coefficient: float, flush: bool) -> None:
    values = (halves.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        raw = (values * np.float32(coefficient)).tobytes()
    assert through(raw, coefficient, flush=flush)[2] == raw


@pytest.mark.parametrize("coefficient", [COEFFICIENT, float(np.float32(0.01)), float(np.float32(0.9999999)), 0.5])
def test_clipped_bf16_gradients_travel_as_bf16(coefficient: float) -> None:
    gradient = torch.randn(1 << 20, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    gradient[:4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    raw = bytes(tensor_bytes(gradient.mul_(coefficient)))
    codec, stored_bytes, back = through(raw, coefficient)
    assert codec == ("bf16" if coefficient == 0.5 else "bf16*k")
    assert (stored_bytes, back) == (2 << 20, raw)


def test_the_default_dtype_of_the_process_changes_nothing() -> None:
    raw = bytes(tensor_bytes(torch.randn(5000).bfloat16().float().mul_(COEFFICIENT)))
    torch.set_default_dtype(torch.float64)
    try:
        assert through(raw, COEFFICIENT) == ("bf16*k", 10_000, raw)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("at", [0, 1023, 1024, 99_999])
def test_one_wide_element_keeps_the_segment_raw(at: int) -> None:
    for scale in (1.0, COEFFICIENT):
        gradient = torch.randn(100_000, generator=torch.Generator().manual_seed(4)).bfloat16().float().mul_(scale)
        gradient.view(torch.int32)[at] ^= 1
        raw = bytes(tensor_bytes(gradient))
        assert through(raw, COEFFICIENT) == ("raw", 400_000, raw)


def test_denormals_behind_a_clip_stay_raw_so_that_a_flushing_thread_can_widen_them() -> None:
    values = torch.full((100,), 1.0).bfloat16().float()
    values[50] = 2.0**-126
    raw = bytes(tensor_bytes(values * COEFFICIENT))
    assert through(raw, COEFFICIENT, flush=True) == ("raw", 400, raw)


@pytest.mark.parametrize("coefficient", [0.0, 1.0, -0.5, 0.1, float("inf"), float("nan"), 1e-40, None])
def test_a_coefficient_that_is_no_normal_positive_fp32_is_not_used(coefficient: float | None) -> None:
    raw = bytes(tensor_bytes(torch.randn(100, generator=torch.Generator().manual_seed(5))))
    assert through(raw, coefficient) == ("raw", 400, raw)


def test_only_fp32_is_looked_at() -> None:
    for dtype in (torch.bfloat16, torch.float64, torch.int32, torch.float8_e4m3fn):
        raw = tensor_bytes(torch.zeros(16, dtype=dtype))
        narrowed = Narrower().narrow(raw, str(dtype).removeprefix("torch."), COEFFICIENT)
        out = torch.ones(16, dtype=dtype)
        widen(narrowed.stored, narrowed.codec, narrowed.coefficient, out)
        assert (narrowed.codec, bytes(tensor_bytes(out))) == ("raw", bytes(raw))


def test_nothing_stays_nothing() -> None:
    assert through(b"", COEFFICIENT) == ("raw", 0, b"")


def test_scratch_is_used_again_and_the_input_is_not_written() -> None:
    narrower = Narrower()
    first, second = torch.full((64,), 1.5), torch.full((64,), 2.5)
    before = bytes(tensor_bytes(first))
    one = narrower.narrow(tensor_bytes(first), "float32").stored
    two = narrower.narrow(tensor_bytes(second), "float32").stored
    assert bytes(one) == bytes(two)
    assert bytes(tensor_bytes(first)) == before


@pytest.mark.parametrize(
    ("codec", "stored_bytes", "out"),
    [
        ("raw", 8, torch.zeros(4)),
        ("bf16", 16, torch.zeros(4)),
        ("bf16", 8, torch.zeros(4, dtype=torch.float64)),
        ("zip", 16, torch.zeros(4)),
    ],
)
def test_bytes_that_do_not_fit_are_refused(codec: str, stored_bytes: int, out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="segment"):
        widen(bytes(stored_bytes), codec, 1.0, out)

"""Equality of bytes, where equality of values would be wrong both ways."""

from __future__ import annotations

import pytest
import torch

from adacheck.same import differing, same_bytes

NAN = torch.tensor([float("nan"), 1.0])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (8, 8), (3, 5, 7)])
def test_a_copy_is_the_same_and_each_flipped_byte_is_not(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    original = torch.ones(shape).to(dtype)
    copy = original.clone()
    assert same_bytes(original, copy)
    if copy.numel():
        copy.view(-1).view(torch.uint8)[-1] ^= 1
        assert not same_bytes(original, copy)


def test_nan_payloads_and_signs_of_zero_count() -> None:
    other = NAN.clone()
    assert same_bytes(NAN, other)
    other.view(torch.int32)[0] += 1
    assert not same_bytes(NAN, other)
    assert not same_bytes(torch.zeros(4), -torch.zeros(4))


def test_dtype_and_shape_count_but_strides_and_offsets_do_not() -> None:
    square = torch.arange(16.0).view(4, 4)
    assert not same_bytes(torch.zeros(4), torch.zeros(4, dtype=torch.int32))
    assert not same_bytes(torch.zeros(4), torch.zeros(2, 2))
    assert same_bytes(square.t(), square.t().contiguous())
    assert same_bytes(torch.arange(5.0)[1:], torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert same_bytes(torch.arange(5.0)[1::2][:1], torch.ones(1))


def test_differing_names_what_is_missing_or_other() -> None:
    one = {"param": torch.zeros(3), "exp_avg": torch.zeros(3), "step": torch.tensor(1.0)}
    other = {"param": torch.zeros(3), "exp_avg": torch.ones(3), "momentum_buffer": torch.zeros(3)}
    assert differing(one, other) == ("exp_avg", "momentum_buffer", "step")
    assert differing(one, dict(one)) == ()

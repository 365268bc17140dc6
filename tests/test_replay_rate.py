"""The benchmark of replay measures what it says, on shapes small enough for a test."""

from __future__ import annotations

from math import prod

from adacheck.tools.bench.replay_rate import gpt_shapes, measure


def test_it_runs_and_counts_what_it_measured() -> None:
    rates = measure(repeats=1, shapes=[(64, 8), (5,)])
    assert (rates.parameters, rates.tensors) == (517, 2)
    assert rates.ratio == rates.bare_s / rates.replay_s


def test_the_default_model_has_the_size_that_is_claimed() -> None:
    assert 50e6 < sum(prod(shape) for shape in gpt_shapes()) < 60e6
    assert len(gpt_shapes()) == 148

"""Medians, tails, and how sure a ratio of medians is: pure functions over lists of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two medians with the ends of its 95% confidence interval."""

    ratio: float
    low: float
    high: float


def median(values: Sequence[float]) -> float:
    """The middle value; the mean of the two middle ones for an even count."""
    return float(np.median(values))


def p99(values: Sequence[float]) -> float:
    """The 99th percentile, interpolated: of few values, close to the largest."""
    return float(np.percentile(values, 99))


def median_ratio(measured: Sequence[Sequence[float]], reference: Sequence[Sequence[float]], seed: int = 0) -> Ratio:
    """Median of `measured` over median of `reference`, each given as blocks of values that were taken in pairs.

    The interval is a percentile bootstrap that draws pairs of blocks and then steps within each block, so that what drifts from
    block to block (other load on the machine) widens it as it should.

    Raises:
        ValueError: the two have not the same number of blocks, or none.
    """
    if len(measured) != len(reference) or not measured:
        raise ValueError(f"{len(measured)} blocks cannot be paired with {len(reference)}")
    generator = np.random.default_rng(seed)
    ratios = np.empty(RESAMPLES)
    for at in range(RESAMPLES):
        chosen = generator.integers(len(measured), size=len(measured))
        upper, lower = (
            np.concatenate([generator.choice(blocks[block], len(blocks[block])) for block in chosen]) for blocks in (measured, reference)
        )
        ratios[at] = np.median(upper) / np.median(lower)
    low, high = np.percentile(ratios, [2.5, 97.5])
    flat_measured, flat_reference = (
        np.concatenate([np.asarray(block, dtype=float) for block in blocks]) for blocks in (measured, reference)
    )
    return Ratio(float(np.median(flat_measured) / np.median(flat_reference)), float(low), float(high))

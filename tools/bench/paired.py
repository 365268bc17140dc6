"""Two identical jobs in one process, one with an arm and one without, in blocks A B B A: how much slower a step becomes.

Blocks in this order cancel what drifts steadily (heat, other load), and two jobs in one process share allocator and caches alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from adacheck.tools.bench.all_arms import ARMS
from adacheck.tools.bench.cores import Placement
from adacheck.tools.bench.statistics import Ratio, median, median_ratio
from adacheck.tools.bench.stepping import Instance, Step
from adacheck.tools.training import JobConfig

BLOCK_STEPS = 5


@dataclass(frozen=True, slots=True)
class PairedResult:
    """Step times of an arm (`B`) against none (`A`), in ms; `apart_ms` is what ended B's blocks, outside of any step."""

    arm: str
    pinned: bool
    steps_per_arm: int
    none_median_ms: float
    arm_median_ms: float
    blocked_median_ms: float
    ratio: Ratio
    none_blocks_ms: list[list[float]]
    arm_blocks_ms: list[list[float]]
    apart_ms: list[dict[str, float]]


def block_order(blocks_per_arm: int) -> Iterator[str]:
    """`A B B A A B B A …`: as many A as B, neighbours in pairs, the first of a pair taking turns."""
    for pair in range(blocks_per_arm):
        yield from "AB" if pair % 2 == 0 else "BA"


def run_paired(arm_name: str, config: JobConfig, steps_per_arm: int, pinned: bool, directory: Path) -> PairedResult:
    """Train both jobs for `steps_per_arm` counted steps, rounded up to whole blocks. Call it in a fresh process."""
    torch.set_num_threads(1)
    with Placement(pinned) as placement:
        arms = (("A", "none"), ("B", arm_name))
        instances = {side: Instance(config, ARMS[name](), directory / side, placement) for side, name in arms}
        for instance in instances.values():
            instance.take_steps(instance.arm.warmup_steps)
            instance.end_block()
        blocks, apart = _alternate(instances, -(-steps_per_arm // BLOCK_STEPS))
        for instance in instances.values():
            instance.arm.close()
    times = {side: [[step.total_ms for step in block] for block in blocks[side]] for side in blocks}
    return PairedResult(
        arm=arm_name,
        pinned=placement.pinned,
        steps_per_arm=len(blocks["B"]) * BLOCK_STEPS,
        none_median_ms=median([time for block in times["A"] for time in block]),
        arm_median_ms=median([time for block in times["B"] for time in block]),
        blocked_median_ms=median([step.blocked_ms for block in blocks["B"] for step in block]),
        ratio=median_ratio(times["B"], times["A"]),
        none_blocks_ms=times["A"],
        arm_blocks_ms=times["B"],
        apart_ms=apart,
    )


def _alternate(instances: dict[str, Instance], blocks_per_arm: int) -> tuple[dict[str, list[list[Step]]], list[dict[str, float]]]:
    blocks: dict[str, list[list[Step]]] = {"A": [], "B": []}
    apart: list[dict[str, float]] = []
    for side in block_order(blocks_per_arm):
        blocks[side].append(instances[side].take_steps(BLOCK_STEPS))
        ended = instances[side].end_block(last=len(blocks[side]) == blocks_per_arm)
        if side == "B":
            apart.append(ended)
    return blocks, apart

"""The benchmark's results as tables for a person and as JSON for a program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from adacheck.tools.bench.alone import AloneResult
from adacheck.tools.bench.packing import Packing
from adacheck.tools.bench.paired import PairedResult
from adacheck.tools.bench.rates import Comparison


def paired_table(results: Sequence[PairedResult]) -> Table:
    """Step time against training without checkpoints."""
    table = Table(title="A checkpoint every step, against none: two identical jobs in one process, blocks A B B A")
    _add_columns(
        table,
        "arm",
        "cores",
        "steps|an arm",
        "none|median ms",
        "arm|median ms",
        "ratio [95%]",
        "blocked|median ms",
        "apart|mean ms a block",
    )
    for result in results:
        ratio = f"{result.ratio.ratio:.3f} [{result.ratio.low:.3f}, {result.ratio.high:.3f}]"
        cores = "pinned" if result.pinned else "free"
        medians = [f"{value:,.1f}" for value in (result.none_median_ms, result.arm_median_ms)]
        apart = _mean_apart(result.apart_ms)
        table.add_row(result.arm, cores, str(result.steps_per_arm), *medians, ratio, f"{result.blocked_median_ms:,.1f}", apart)
    return table


def alone_table(results: Sequence[AloneResult]) -> Table:
    """What each arm costs by itself."""
    table = Table(title="Each arm alone, a checkpoint every step, trainer on one core and background threads on the other")
    _add_columns(table, "arm", "blocked|median ms", "blocked|P99 ms", "step|median ms", "MB|a step")
    _add_columns(table, "CPU s|training", "CPU s|checkpoint", "CPU s|background", "peak RSS|MB")
    for result in results:
        times = [f"{value:,.1f}" for value in (result.blocked_median_ms, result.blocked_p99_ms, result.step_median_ms)]
        cpu = [f"{value:.3f}" for value in (result.training_cpu_s, result.checkpoint_cpu_s, result.background_cpu_s)]
        table.add_row(result.arm, *times, f"{result.written_bytes_per_step / 1e6:,.1f}", *cpu, f"{result.peak_rss_bytes / 1e6:,.0f}")
    return table


def rates_table(results: Sequence[Comparison]) -> Table:
    """Parts beside the bare operations that bound them."""
    table = Table(title="Parts beside the bare operation that bounds each, one thread, in turns")
    _add_columns(table, "part", "bare operation", "bare", "ours", "ratio", "unit")
    for result in results:
        ours = ["", ""] if result.ours is None or result.ratio is None else [f"{result.ours:,.1f}", f"{result.ratio:.2f}"]
        table.add_row(result.part, result.bare_operation, f"{result.bare:,.1f}", *ours, result.unit)
    return table


def packing_table(results: Sequence[Packing]) -> Table:
    """What compress=zstd:LEVEL gains, and its rates."""
    table = Table(title="compress=zstd:LEVEL on the model's own tensors, after narrowing, one thread")
    _add_columns(table, "part", "level", "fp32|MB", "narrowed|MB", "packed|MB", "ratio", "in|GB/s", "out|GB/s")
    for result in results:
        sizes = [f"{size / 1e6:,.1f}" for size in (result.raw_bytes, result.unpacked_bytes, result.packed_bytes)]
        rates = [f"{rate:.2f}" for rate in (result.pack_gb_per_s, result.unpack_gb_per_s)]
        table.add_row(result.kind, str(result.level), *sizes, f"{result.ratio:.2f}", *rates)
    return table


def as_json(
    machine: dict[str, str],
    paired: Sequence[PairedResult],
    alone: Sequence[AloneResult],
    rates: Sequence[Comparison],
    packing: Sequence[Packing],
) -> str:
    """Everything that was measured, every single step time included."""
    parts: dict[str, Sequence[Any]] = {"paired": paired, "alone": alone, "rates": rates, "packing": packing}
    return json.dumps({"machine": machine} | {name: [asdict(result) for result in part] for name, part in parts.items()}, indent=2)


def _add_columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name.replace("|", "\n"), justify="left" if name in ("arm", "cores", "part", "bare operation", "unit") else "right")


def _mean_apart(blocks: Sequence[dict[str, float]]) -> str:
    names = dict.fromkeys(name for block in blocks for name in block)
    seen = {name: [block[name] for block in blocks if name in block] for name in names}
    return ", ".join(f"{name} {sum(values) / len(values):,.1f}" for name, values in seen.items())

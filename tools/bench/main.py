"""`adacheck-bench`: what a checkpoint at every step costs, against none, `torch.save` and `torch.distributed.checkpoint`.

Each measurement runs in a process of its own, one after the other; this one only starts them and prints.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import torch
import typer
from rich.console import Console

from adacheck.tools.bench.all_arms import ARMS
from adacheck.tools.bench.alone import AloneResult, run_alone
from adacheck.tools.bench.packing import Packing, measure_packing
from adacheck.tools.bench.paired import PairedResult, run_paired
from adacheck.tools.bench.rates import Comparison, measure_rates
from adacheck.tools.bench.report import alone_table, as_json, packing_table, paired_table, rates_table
from adacheck.tools.byte_gpt import GPTConfig
from adacheck.tools.training import BENCH_JOB, JobConfig

P = ParamSpec("P")
R = TypeVar("R")

SMALL_JOB = replace(BENCH_JOB, model=GPTConfig(context=64, width=64, layers=2, heads=4), batch=4, corpus_bytes=100_000)
"""For a look at whether everything runs; its figures mean nothing."""

app = typer.Typer(add_completion=False)


def in_fresh_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of a call in a new interpreter, with one thread for torch from its start."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "cores": str(os.cpu_count()),
        "cpu": f"{platform.machine()}, {capability}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def measure_pairs(arms: list[str], config: JobConfig, steps: int, root: Path, console: Console) -> list[PairedResult]:
    """Every arm against none, first pinned, then with the cores free."""
    results = []
    for pinned in (True, False):
        for arm in arms:
            with (
                console.status(f"{arm} against none, {'pinned' if pinned else 'cores free'}"),
                tempfile.TemporaryDirectory(dir=root) as folder,
            ):
                results.append(in_fresh_process(run_paired, arm, config, steps, pinned, Path(folder)))
    return results


def measure_alone(arms: list[str], config: JobConfig, steps: int, root: Path, console: Console) -> list[AloneResult]:
    """Every arm by itself."""
    results = []
    for arm in arms:
        with console.status(f"{arm}, alone"), tempfile.TemporaryDirectory(dir=root) as folder:
            results.append(in_fresh_process(run_alone, arm, config, steps, Path(folder) / "store"))
    return results


def measure_parts(root: Path, console: Console) -> list[Comparison]:
    """Rates of the single parts."""
    with console.status("parts"), tempfile.TemporaryDirectory(dir=root) as folder:
        return in_fresh_process(measure_rates, Path(folder))


def measure_compression(config: JobConfig, console: Console) -> list[Packing]:
    """Ratio and rate of compression."""
    with console.status("compression"):
        return in_fresh_process(measure_packing, config)


@app.command()
def bench(
    arm: Annotated[list[str] | None, typer.Option(help="Measure only this arm; may be given again.")] = None,
    paired: Annotated[list[str] | None, typer.Option(help="Arm to compare with none in pairs; may be given again.")] = None,
    paired_steps: Annotated[int, typer.Option(help="Steps of each side of a pair, in blocks of 5; 0 leaves pairs out.")] = 20,
    alone_steps: Annotated[int, typer.Option(help="Steps of each arm alone; 0 leaves this out.")] = 6,
    rates: Annotated[bool, typer.Option(help="Measure replay, digest, log and compression by themselves.")] = True,
    directory: Annotated[Path | None, typer.Option(help="Where to write checkpoints: a disk worth measuring.")] = None,
    small: Annotated[bool, typer.Option(help="A tiny model, to see that everything runs.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write all figures to this file.")] = None,
) -> None:
    """Measure what a checkpoint at every training step costs (50.8 million parameters, 4,096 tokens a step)."""
    unknown = sorted(set((arm or []) + (paired or [])) - set(ARMS))
    if unknown:
        raise typer.BadParameter(f"no arm {', '.join(unknown)}; there are {', '.join(ARMS)}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    config = SMALL_JOB if small else BENCH_JOB
    root = directory or Path.cwd()
    pairs = measure_pairs(paired or PAIRED, config, paired_steps, root, console) if paired_steps else []
    if pairs:
        console.print(paired_table(pairs))
    alone = measure_alone(arm or list(ARMS), config, alone_steps, root, console) if alone_steps else []
    if alone:
        console.print(alone_table(alone))
    measured_rates = measure_parts(root, console) if rates else []
    if measured_rates:
        console.print(rates_table(measured_rates))
    packing = measure_compression(config, console) if rates else []
    if packing:
        console.print(packing_table(packing))
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    if json:
        json.write_text(as_json(machine(), pairs, alone, measured_rates, packing))


PAIRED = ["adacheck"]
"""Arms that are compared with none in pairs unless others are asked for."""


def main() -> None:
    """Entry point of `adacheck-bench`."""
    app()


if __name__ == "__main__":
    main()

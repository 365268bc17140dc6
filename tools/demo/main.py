"""The command `adacheck-demo`: for each variant of a training job, what a kill costs, and whether anything was lost by it.

This process trains nothing itself; it starts training scripts, kills them, and compares what they tell.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adacheck.tools.demo.process import DemoError
from adacheck.tools.demo.stages import STEPS, Setup, flip_bit, lose_nvme, restore_and_finish, train_and_kill, train_uninterrupted
from adacheck.tools.demo.story import Story
from adacheck.tools.demo.task import VARIANTS

DISK_NEED_BYTES = 3 << 29
"""About 1 GiB is used, and kept with `--keep`."""

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    s3: Annotated[bool, typer.Option("--s3", help="Keep full checkpoints on a real S3 server, started for this on loopback.")] = False,
    variant: Annotated[list[str] | None, typer.Option(help="Only this one (autocast, bf16); may be given again.")] = None,
    seed: Annotated[int, typer.Option(help="Of the moment of the kill, and of the bit that is flipped.")] = 1,
    directory: Annotated[Path | None, typer.Option("--dir", help="Where to write, about 1 GiB, on a local disk.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything that was written.")] = False,
    small: Annotated[bool, typer.Option("--small", help="A tiny model: shows that everything runs; its figures mean little.")] = False,
) -> None:
    """Train a small GPT with a checkpoint at every step, kill it, restore it, and compare bit for bit with a run nobody killed."""
    variants = list(dict.fromkeys(variant or VARIANTS))
    if unknown := [name for name in variants if name not in VARIANTS]:
        raise typer.BadParameter(f"there is no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    begun = time.monotonic()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100, soft_wrap=True)
    story = Story(console)
    try:
        with _folder(directory, keep) as folder, ExitStack() as stack:
            _tell(Setup(folder, *_object_tier(s3, folder, stack), small, seed), variants, story)
    except DemoError as error:
        story.failed.append(str(error))
    if keep and directory is None:
        story.say(f"everything is kept in {folder}")
    if story.failed:
        story.stage(f"FAILED after {time.monotonic() - begun:.0f} s:")
        for line in story.failed:
            story.say(line)
        raise typer.Exit(1)
    story.stage(f"All equal, all found. Took {time.monotonic() - begun:.0f} s.")


def _tell(setup: Setup, variants: list[str], story: Story) -> None:
    story.say(f"A byte-level GPT learns the Python standard library's sources, {STEPS} steps, on the CPU.")
    story.say(f"Full checkpoints go to {setup.objects}, the log of every step to {setup.folder}.")
    story.stage(f"1. Train {STEPS} steps without interruption and without adacheck: what the others must equal")
    references = train_uninterrupted(setup, variants, story)
    figures, equal = {}, {}
    for number, variant in enumerate(variants, 2):
        story.stage(f"{number}. {VARIANTS[variant]}: a checkpoint at every step, kill -9 at a random moment, restore, go on")
        killed = train_and_kill(setup, variant, story)
        figures[variant], equal[variant] = restore_and_finish(setup, variant, killed, references[variant], story)
    first, number = variants[0], len(variants) + 2
    story.stage(f"{number}. {VARIANTS[first]}: the host is lost with its disk, only the object tier is left")
    lose_nvme(setup, first, references[first], story)
    story.stage(f"{number + 1}. {VARIANTS[first]}: a bit rots on the disk")
    flip_bit(setup, first, story)
    story.table(figures, equal)


def _object_tier(s3: bool, folder: Path, stack: ExitStack) -> tuple[str, dict[str, str]]:
    """Address of the object tier and the variables to reach it; a server of our own ends with `stack`."""
    if not s3:
        return (folder / "objects").as_uri(), {}
    from adacheck.tools.seaweed import BUCKET, Seaweed, SeaweedError

    try:
        server = stack.enter_context(Seaweed(folder / "s3"))
    except SeaweedError as error:
        raise DemoError(str(error)) from error
    return f"s3://{BUCKET}/demo", server.environment


@contextmanager
def _folder(parent: Path | None, keep: bool) -> Iterator[Path]:
    """A new folder, removed at the end unless it is to be kept."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="adacheck-demo-", dir=parent)).resolve()
    try:
        free = shutil.disk_usage(folder).free
        if free < DISK_NEED_BYTES:
            raise DemoError(f"{folder} has {free >> 20} MiB free, and the demo needs {DISK_NEED_BYTES >> 20}; give it a disk with --dir")
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)

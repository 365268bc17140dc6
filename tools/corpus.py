"""Real text that is on every machine, the Python standard library's sources, and a shuffled loader over it.

The demo and the benchmark may not download anything, and random bytes would give gradients like no real job's.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}


def source_files(root: Path) -> Iterator[Path]:
    """The `.py` files below `root`, in an order that depends on their names alone; no tests, and nothing that pip installed."""
    files = (path for path in root.rglob("*.py") if not _SKIPPED.intersection(path.relative_to(root).parts))
    yield from sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_corpus(size_bytes: int) -> torch.Tensor:
    """The first `size_bytes` of the standard library's sources as one uint8 tensor, shape `(size_bytes,)` (shorter if there is less).

    Raises:
        FileNotFoundError: this Python came without the sources of its standard library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    content = bytearray()
    for path in source_files(root):
        content += path.read_bytes()
        if len(content) >= size_bytes:
            break
    if not content:
        raise FileNotFoundError(f"no Python sources under {root}; run this with a Python that has its standard library as files")
    return torch.from_numpy(np.frombuffer(bytes(content[:size_bytes]), dtype=np.uint8).copy())


class ShuffledWindows:
    """Endless batches of byte windows, every window once an epoch, in an order drawn anew for each epoch.

    Its state is a few plain integers: the order follows from seed and epoch and is never stored.

    Args:
        corpus: uint8, one dimension.
        batch: windows a batch.
        context: bytes the model sees; a window has one more, the last target.
        seed: of the order.
    """

    def __init__(self, corpus: torch.Tensor, batch: int, context: int, seed: int) -> None:
        self._batch = batch
        self._windows = corpus[: len(corpus) // (context + 1) * (context + 1)].view(-1, context + 1)
        if len(self._windows) < batch:
            raise ValueError(
                f"a corpus of {len(corpus)} bytes has {len(self._windows)} windows of {context + 1}, too few for one batch of {batch}"
            )
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled()

    def next_batch(self) -> torch.Tensor:
        """The next windows, int64 `(batch, context + 1)`. What is too little for a batch at an epoch's end is dropped."""
        if self._position + self._batch > len(self._windows):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        chosen = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        return self._windows[chosen].long()

    def state_dict(self) -> dict[str, int]:
        """Where the loader is, and what it must agree on with the loader that goes on from here."""
        count, size = self._windows.shape
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "windows": count,
            "window_bytes": size,
            "batch": self._batch,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: `state` is of another corpus, window or batch size, whose positions mean other bytes.
        """
        mine = self.state_dict()
        other = [name for name in ("windows", "window_bytes", "batch") if state[name] != mine[name]]
        if other:
            raise ValueError("; ".join(f"the loader's {name} was {state[name]} and is {mine[name]} now" for name in other))
        self._seed, self._epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return torch.randperm(len(self._windows), generator=generator)

"""Makes the golden stores of a format version: `python -m tests.golden.make_golden tests/golden/v1`, once for each version.

It never overwrites: a golden store is what a *released* version wrote, and every later release must restore it. `expected.json`
has the digest of every tensor after every step, taken from the live job with torch and blake3 alone. The store was made by two
starts of one job: 9 steps, then a restore and 2 more. `store` has its tensors as they are, `packed` through zstd, from a model that
is large enough for that. LMDB files are compacted; locks are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import blake3
import lmdb
import torch

import adacheck

OPTIONS = {"full_every": 4, "log_steps": 4, "refresh": 3, "keep": 2}
FIRST, SECOND = 9, 2


class Tiny(torch.nn.Module):
    """A tied embedding, a frozen weight, a buffer and a norm, in 48 parameters if it is 4 wide."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, width)
        self.frozen = torch.nn.Linear(width, width, bias=False).requires_grad_(False)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits; counts its calls."""
        self.count += 1
        hidden: torch.Tensor = self.norm(self.frozen(self.embed(tokens)))
        return torch.nn.functional.linear(hidden, self.head.weight)


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Two-level digest of every tensor, by the key it has in a full checkpoint; all tensors are shorter than a segment."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    found = {f"model.{name}": tensor for name, tensor in named.items()}
    for name, parameter in model.named_parameters():
        found.update({f"optim.state.{name}.{entry}": value for entry, value in optimizer.state.get(parameter, {}).items()})
    raw = {key: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for key, tensor in found.items()}
    return {key: blake3.blake3(blake3.blake3(content).digest()).hexdigest() for key, content in raw.items()}


def train(root: Path, steps: int, expected: dict[str, dict[str, str]], seed: int = 1, width: int = 4, compress: str = "none") -> None:
    """One start of the job: restore, some steps, and a clean end."""
    torch.manual_seed(seed)
    model = Tiny(width)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    with adacheck.Store.open(f"file://{root}/objects", nvme=str(root / "nvme"), compress=compress, **OPTIONS) as store:
        ckpt = store.attach(model, optimizer, {"scheduler": scheduler})
        start = ckpt.restore()
        for step in range(start + 1, start + steps + 1):
            tokens = torch.randint(0, 6, (5, 3))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            ckpt.step()
            ckpt.drain()
            keeper = ckpt._keeper
            assert keeper is not None
            assert keeper.shared.wait(lambda: not keeper.uploading, 60)  # noqa: B023 - called at once
            expected[str(step)] = digests(model, optimizer)
        ckpt.close()


def make(target: Path, width: int, compress: str) -> None:
    """Make a store and its expected digests under `target`, which must not exist."""
    if target.exists():
        sys.exit(f"{target} exists; a golden store is never overwritten")
    expected: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for steps in (FIRST, SECOND):
            train(root, steps, expected, width=width, compress=compress)
        shutil.copytree(root / "objects", target / "objects")
        (file,) = root.rglob("data.mdb")
        copy = target / file.parent.relative_to(root)
        copy.mkdir(parents=True)
        with lmdb.open(str(file.parent), readonly=True, lock=False) as environment:
            environment.copy(str(copy), compact=True)
    (target / "expected.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    version = Path(sys.argv[1])
    make(version / "store", 4, "none")
    make(version / "packed", 64, "zstd:1")

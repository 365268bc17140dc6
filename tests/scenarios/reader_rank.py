"""One rank that shards a fresh job with FSDP2 and loads cuts into it: `python -m … RANK WORLD FOLDER CASES`.

`CASES` is JSON: name -> [uri of each rank, step or "latest"]. Rank 0 writes what each loaded to `FOLDER/name.json`. The ranks meet at
a file, so no port is anybody's guess.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import fully_shard

import adacheck
from tests.dcp_job import digests, flat_state, put_back


class Uneven(torch.nn.Module):
    """Parameters whose first dimension two ranks cannot halve: 7, 3 and 1; and buffers, which stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.inner = torch.nn.Linear(6, 3)
        self.outer = torch.nn.Linear(3, 1)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """One number a token."""
        hidden: torch.Tensor = self.outer(torch.tanh(self.inner(self.norm(self.embed(tokens)))))
        return hidden * self.scale


def job(seed: int, *, sharded: bool = False) -> tuple[Uneven, torch.optim.Optimizer]:
    """The job; sharded over all ranks or whole."""
    torch.manual_seed(seed)
    model = Uneven()
    if sharded:
        for part in (model.inner, model.outer, model):
            fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def main() -> None:
    rank, world, folder, cases = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        for name, (uris, step) in cases.items():
            model, optimizer = job(99, sharded=True)
            flat = flat_state(model, optimizer)
            with adacheck.Store.open(uris[rank]) as store:
                reader = store.reader(step)
                load(flat, storage_reader=reader)
            put_back(model, optimizer, flat)
            found = digests(flat_state(model, optimizer))
            if rank == 0:
                (folder / f"{name}.json").write_text(json.dumps({"step": reader.step, "digests": found}))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The training job of the demo and the benchmark, as a user would write one: model, fused AdamW, clipping, schedule, loader.

It knows nothing of checkpoints. From a seed it computes the same bits in every run on one kind of machine and thread count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional

from adacheck.tools.byte_gpt import BENCH, DEMO, ByteGPT, GPTConfig
from adacheck.tools.corpus import ShuffledWindows, read_corpus

Precision = Literal["autocast", "bf16"]
"""`autocast`: fp32 parameters and AdamW, forward in bf16. `bf16`: parameters, gradients and optimizer all in bf16."""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """Everything that decides the job's bits; `dataclasses.replace` makes variants. A step trains `batch * model.context` tokens."""

    model: GPTConfig
    batch: int
    precision: Precision = "autocast"
    seed: int = 1
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    total_steps: int = 1_000
    clip_norm: float = 1.0
    corpus_bytes: int = 4 << 20


DEMO_JOB = JobConfig(DEMO, batch=4, total_steps=60)
BENCH_JOB = JobConfig(BENCH, batch=32, learning_rate=3e-4)
"""4,096 tokens a step."""


def learning_rate_factor(step: int, config: JobConfig) -> float:
    """Linear warm-up to 1, then half a cosine down to 0.1 at `total_steps`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class TrainingJob:
    """Model, optimizer and what belongs to them, ready for its first step.

    Building one seeds torch's global generator, which dropout draws from: two jobs in one process share it.

    Attributes:
        model, optimizer: what a checkpoint must hold.
        extra: what it must hold besides, under the names `scheduler` and `loader`.
    """

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        torch.manual_seed(config.seed)
        self.model = ByteGPT(config.model)
        if config.precision == "bf16":
            self.model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: learning_rate_factor(step, config))
        self.loader = ShuffledWindows(read_corpus(config.corpus_bytes), config.batch, config.model.context, config.seed)
        self.extra: dict[str, Any] = {"scheduler": self.scheduler, "loader": self.loader}

    def train_one_step(self) -> float:
        """One batch: forward, backward, clip, optimizer, schedule. Returns the loss in nats a byte, before the step."""
        windows = self.loader.next_batch()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.precision == "autocast"):
            logits = self.model(windows[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

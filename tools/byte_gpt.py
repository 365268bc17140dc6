"""A small GPT over bytes in plain PyTorch: the model that the demo and the benchmark train.

It has what makes a checkpoint interesting: dropout, normalisation, and embeddings that may be tied to the output layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
"""One token per value of a byte."""


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Shape of the model. `tied`: the output layer's weight is the embedding's."""

    context: int
    width: int
    layers: int
    heads: int
    dropout: float = 0.1
    tied: bool = True


DEMO = GPTConfig(context=128, width=256, layers=4, heads=8)
"""3.3 million parameters."""

BENCH = GPTConfig(context=128, width=1024, layers=4, heads=16)
"""50.8 million parameters; wide rather than deep, which costs half the time per token of 8 layers of 768."""


class Block(nn.Module):
    """One pre-norm layer of a transformer: `(batch, context, width)` to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.project(self._attend(self.norm_attention(x))))
        result: torch.Tensor = x + self.dropout(self.narrow(functional.gelu(self.widen(self.norm_mlp(x)))))
        return result

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        query, key, value = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, context, width)


class ByteGPT(nn.Module):
    """Bytes to logits: int64 `(batch, context)` to `(batch, context, 256)`. Weights are drawn from torch's global generator."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(_initialise)
        for block in self.blocks:
            assert isinstance(block, Block)
            for last in (block.project, block.narrow):
                nn.init.normal_(last.weight, std=0.02 * (2 * config.layers) ** -0.5)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position(places))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)

"""A small transformer, its data and its loss, for tests of training."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH = 19, 24, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 50), nn.Linear(50, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).movedim(2, 0).transpose(2, 3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Toy(nn.Module):
    """Odd sizes that split unevenly, a parameter of 3 that 4 ranks cannot all have a part of, a buffer."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.few = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.few.mean() * self.scale
        return logits[:, :-1], x[:, 0]  # views, as models with several outputs return them


def make_toy(depth: int = 2) -> Toy:
    torch.manual_seed(3)
    return Toy(depth)


def loss_of(model: Any, batch: Tensor) -> dict[str, Tensor]:
    """`batch` int64 [B, LENGTH]."""
    logits, first = model(batch)
    text = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    penalty = first.float().square().mean()
    return {"loss": text + 0.1 * penalty, "loss/video": text, "loss/action": penalty}


def noisy_loss_of(model: Any, batch: Tensor) -> dict[str, Tensor]:
    """Draws from the global generator, as a diffusion loss does."""
    noise = torch.randint(0, VOCABULARY, batch.shape)
    return loss_of(model, torch.where(torch.rand(batch.shape) < 0.2, noise, batch))


class TokenBatches:
    """Batch `n` of data rank `r` is made of samples (n * degree + r) * size onwards: equal global batches."""

    def __init__(self, size: int, rank: int, degree: int) -> None:
        self.size, self.rank, self.degree, self.position = size, rank, degree, 0

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        first = (self.position * self.degree + self.rank) * self.size
        self.position += 1
        samples = [
            torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(first + i))
            for i in range(self.size)
        ]
        return torch.stack(samples)

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.position * self.degree * self.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["samples"] // (self.degree * self.size)

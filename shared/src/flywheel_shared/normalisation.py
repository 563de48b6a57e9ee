"""A robot's numbers to [-1, 1] and back, by the 1st and 99th percentile of a corpus."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

FIELDS = ("min", "max", "mean", "std", "q01", "q99")


def summarise(values: np.ndarray) -> dict[str, list[float]]:
    """Minimum, maximum, mean, deviation and 1st and 99th percentile of each column of `[N, D]`."""
    wide = values.astype(np.float64)
    q01, q99 = np.quantile(wide, (0.01, 0.99), axis=0)
    found = (wide.min(0), wide.max(0), wide.mean(0), wide.std(0), q01, q99)
    return {name: [float(v) for v in column] for name, column in zip(FIELDS, found, strict=True)}


class QuantileNorm:
    """Scale by the 1st and 99th percentile: `2 (x - q01) / (q99 - q01) - 1`, clamped to [-1, 1].

    A dim whose percentiles are equal passes as it is (the published rule), clamped too.
    """

    def __init__(self, statistics: Mapping[str, Sequence[float]], padded_dim: int) -> None:
        """`statistics` has `q01` and `q99`, as `summarise` gives them."""
        self.q01 = torch.tensor(statistics["q01"], dtype=torch.float32)
        self.q99 = torch.tensor(statistics["q99"], dtype=torch.float32)
        self.dim = self.q01.numel()
        if self.dim > padded_dim:
            raise ValueError(f"{self.dim} dims do not fit in the model's {padded_dim}")
        self.padded_dim = padded_dim
        self.constant = self.q99 == self.q01
        self.span = torch.where(self.constant, torch.ones_like(self.q01), self.q99 - self.q01)

    def normalise(self, x: Tensor) -> Tensor:
        """`[..., D] -> [..., padded_dim]`, zeros in the padding."""
        scaled = torch.where(self.constant, x, 2 * (x - self.q01) / self.span - 1).clamp(-1, 1)
        return torch.nn.functional.pad(scaled, (0, self.padded_dim - self.dim))

    def restore(self, x: Tensor) -> Tensor:
        """`[..., padded_dim] -> [..., D]`, clamped to the range seen in training."""
        x = x[..., : self.dim].clamp(-1, 1)
        return torch.where(self.constant, x, (x + 1) / 2 * self.span + self.q01)

"""Encoders of actions and states and the decoder of actions.

Weights keep the leading "embodiment" dim of the published checkpoints. It has size 1: the reference replaces every
embodiment id by 0, so one set of weights serves all.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu


class EmbodimentLinear(nn.Module):
    """A linear layer stored as ``W [1, in, out]`` and ``b [1, out]``."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(1, in_features, out_features))
        self.b = nn.Parameter(torch.empty(1, out_features))

    def reset_parameters(self) -> None:
        """Unit-variance outputs. The reference's 0.02 leaves 7 action dims a twentieth of the time signal's size."""
        nn.init.normal_(self.W, std=1 / math.sqrt(self.W.shape[1]))
        nn.init.zeros_(self.b)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, L, in] -> [B, L, out]``."""
        return x @ self.W[0] + self.b[0]


class EmbodimentMLP(nn.Module):
    """Two layers with a ReLU between: the state encoder and the action decoder."""

    def __init__(self, in_features: int, hidden: int, out_features: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(in_features, hidden)
        self.layer2 = EmbodimentLinear(hidden, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, L, in] -> [B, L, out]``."""
        return self.layer2(relu(self.layer1(x)))


def sinusoid(timestep: Tensor, dim: int) -> Tensor:
    """Sine then cosine of ``t * 1e4^(-i / (dim / 2))``: ``[...] -> [..., dim]`` float32 (pi0's action time code)."""
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float32, device=timestep.device) * (math.log(10_000.0) / half)
    phase = timestep.float().unsqueeze(-1) * torch.exp(-exponent)
    return torch.cat((phase.sin(), phase.cos()), dim=-1)


class ActionEncoder(nn.Module):
    """Noisy actions and their times to tokens (pi0's action encoder)."""

    def __init__(self, action_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.W1 = EmbodimentLinear(action_dim, dim)
        self.W2 = EmbodimentLinear(2 * dim, dim)
        self.W3 = EmbodimentLinear(dim, dim)

    def forward(self, action: Tensor, timestep: Tensor) -> Tensor:
        """``action [B, A, action_dim]``, ``timestep [B, A]`` in [0, 1000] ``-> [B, A, dim]``."""
        embedded = self.W1(action)
        time = sinusoid(timestep, self.dim).to(embedded.dtype)
        return self.W3(silu(self.W2(torch.cat((embedded, time), dim=-1))))

"""AdamW, and its learning rate over the steps."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from flywheel_shared.fsdp import local


def make_adamw(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW over the parameters that need gradients; vectors (norms, biases) are not decayed.

    Its state is there from the start: so it can be saved and loaded at any step alike.
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=learning_rate, betas=betas, eps=eps, fused=True
    )
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=local(parameter).device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def learning_rate_at(step: int, *, peak: float, warmup_steps: int, max_steps: int, min_ratio: float) -> float:
    """Rate of step 1, 2, ...: a straight line up to `peak` at `warmup_steps`, then half a cosine.

    It ends at `min_ratio * peak` in step `max_steps`.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    done = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

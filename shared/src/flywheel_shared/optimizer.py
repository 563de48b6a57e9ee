"""AdamW, and its learning rate over the steps."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from flywheel_shared.fsdp import local


def make_adamw(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    multipliers: Mapping[str, float] | None = None,
) -> torch.optim.AdamW:
    """AdamW over the named parameters that need gradients; vectors (norms, biases) are not decayed.

    `multipliers` scale the learning rate of parameters whose names begin so; a group keeps its own as
    `lr_multiplier`. The state is there from the start: so it can be saved and loaded at any step alike.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            found = [factor for start, factor in (multipliers or {}).items() if name.startswith(start)]
            key = (found[-1] if found else 1.0, weight_decay if parameter.ndim > 1 else 0.0)
            groups.setdefault(key, []).append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": params, "weight_decay": decay, "lr_multiplier": factor, "lr": learning_rate * factor}
            for (factor, decay), params in groups.items()
        ],
        lr=learning_rate,
        betas=betas,
        eps=eps,
        fused=True,
    )
    for parameter in (p for params in groups.values() for p in params):
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

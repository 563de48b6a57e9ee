"""An exponential moving average of a model's parameters."""

import torch
from torch import nn

from flywheel_shared.fsdp import local


class Average:
    """The average of the parameters, sharded as they are, float32.

    The decay of update ``k`` is ``min(decay, (1 + k) / (10 + k))``, so that the average follows the first steps
    (TensorFlow's ExponentialMovingAverage).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the parameters after optimiser step ``step`` (1, 2, ...)."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        mine = [local(value) for value in self.values.values()]
        theirs = [local(p.detach()) for p in model.parameters()]
        torch._foreach_lerp_(mine, theirs, weight)

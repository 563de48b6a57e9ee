"""The moving average of a model's weights."""

import torch
from torch import Tensor, nn

from flywheel_shared.fsdp import local


class Average:
    """Exponential moving average of the trained parameters, in float32, sharded as they are.

    The decay grows as (1 + n) / (10 + n) over n updates up to `decay`, so that the random start is forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._averages = {name: p.detach().clone().float() for name, p in self._trained.items()}
        self._others = {name: x for name, x in model.state_dict().items() if name not in self._trained}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Take in the parameters; `updates` were made before."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        averages = [local(x) for x in self._averages.values()]
        torch._foreach_lerp_(averages, [local(p).float() for p in self._trained.values()], 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """A state dict of the model, with averages for the trained parameters, sharing memory with both."""
        return {**self._others, **self._averages}

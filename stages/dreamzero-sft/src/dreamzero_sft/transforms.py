"""From a robot's numbers and pictures to the model's, and back. Training samples and requests use the same object."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from flywheel_shared.recipe import Section


class ViewSettings(Section):
    """How pictures reach the model.

    Attributes:
        cameras: dataset keys of the views, left to right in the model's picture.
        request_keys: keys of the same views in a policy request.
        height, width: pixels of one view in the model's picture.
    """

    cameras: tuple[str, ...] = ("observation.images.agentview", "observation.images.wrist")
    request_keys: tuple[str, ...] = ("observation/image", "observation/wrist_image")
    height: int
    width: int


class QuantileNorm:
    """Scale by the 1st and 99th percentile: ``2 (x - q01) / (q99 - q01) - 1``, clamped to [-1, 1].

    A dim whose percentiles are equal passes as it is (the published rule), clamped too.
    """

    def __init__(self, statistics: Mapping[str, Sequence[float]], padded_dim: int) -> None:
        self.q01 = torch.tensor(statistics["q01"], dtype=torch.float32)
        self.q99 = torch.tensor(statistics["q99"], dtype=torch.float32)
        self.dim = self.q01.numel()
        if self.dim > padded_dim:
            raise ValueError(f"{self.dim} dims do not fit in the model's {padded_dim}")
        self.padded_dim = padded_dim
        self.constant = self.q99 == self.q01
        self.span = torch.where(self.constant, torch.ones_like(self.q01), self.q99 - self.q01)

    def normalise(self, x: Tensor) -> Tensor:
        """``[..., D] -> [..., padded_dim]``, zeros in the padding."""
        scaled = torch.where(self.constant, x, 2 * (x - self.q01) / self.span - 1).clamp(-1, 1)
        return torch.nn.functional.pad(scaled, (0, self.padded_dim - self.dim))

    def restore(self, x: Tensor) -> Tensor:
        """``[..., padded_dim] -> [..., D]``, clamped to the range seen in training."""
        x = x[..., : self.dim].clamp(-1, 1)
        return torch.where(self.constant, x, (x + 1) / 2 * self.span + self.q01)


class Transform:
    """Views, states and actions of one embodiment."""

    def __init__(
        self, metadata: Mapping[str, Any], views: ViewSettings, action_dim: int, state_dim: int
    ) -> None:
        self.views = views
        self.action = QuantileNorm(metadata["statistics"]["action"]["actions"], action_dim)
        self.state = QuantileNorm(metadata["statistics"]["state"]["state"], state_dim)

    def resize(self, frames: Tensor) -> Tensor:
        """One camera's ``uint8 [T, C, H, W]`` to the view's size, uint8, antialiased."""
        size = (self.views.height, self.views.width)
        if frames.shape[-2:] == size:
            return frames
        resized = interpolate(frames.float(), size, mode="bilinear", antialias=True, align_corners=False)
        return resized.round().clamp(0, 255).to(torch.uint8)

    def picture(self, frames: Sequence[Tensor]) -> Tensor:
        """Views ``uint8 [B, T, C, h, w]``, side by side: float ``[B, C, T, h, n w]`` in [-1, 1]."""
        joined = torch.cat(list(frames), dim=-1).transpose(1, 2)
        return joined.float() / 127.5 - 1

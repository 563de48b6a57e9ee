"""A robot's pictures to the model's: views of one size, side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from flywheel_shared.errors import UserError


def resize(frames: Tensor, height: int, width: int) -> Tensor:
    """One camera's uint8 `[T, C, H, W]` to a view's size, uint8, antialiased, each frame by itself."""
    if frames.shape[-2:] == (height, width):
        return frames
    resized = interpolate(
        frames.float(), (height, width), mode="bilinear", antialias=True, align_corners=False
    )
    return resized.round().clamp(0, 255).to(torch.uint8)


def side_by_side(views: Sequence[Tensor]) -> Tensor:
    """Views uint8 `[B, T, C, h, w]`, left to right: float `[B, C, T, h, n w]` in [-1, 1]."""
    return torch.cat(list(views), dim=-1).transpose(1, 2).float() / 127.5 - 1


def view_of_request(observation: Mapping[str, Any], key: str, height: int, width: int) -> Tensor:
    """One picture of a policy request as uint8 `[1, 1, C, height, width]`.

    Raises `UserError` that names the key where it is missing or no uint8 `[H, W, 3]`.
    """
    picture = np.asarray(observation.get(key))
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or 0 in picture.shape:
        raise UserError(f"{key}: uint8 [H, W, 3] is needed, found {picture.dtype} {list(picture.shape)}")
    frames = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None]
    return resize(frames, height, width)[None]

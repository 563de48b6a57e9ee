"""Rotary position embeddings: three axes for video, one for actions and one for states.

Frequencies follow RoPE (Su et al., 2021) with theta 1e4. A head's channels are split over time, height and width
as Wan does: with ``d`` channels, ``d - 4 * (d // 6)`` for time and ``2 * (d // 6)`` for each spatial axis.
Clean and noisy copies of a frame have the same position; action tokens are numbered across blocks, states by block.
"""

import torch
from torch import Tensor

THETA = 10_000.0


def angles(positions: Tensor, channels: int) -> Tensor:
    """Angles ``position * theta^(-2i/channels)``: ``[P] -> [P, channels / 2]`` float64."""
    exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=positions.device) / channels
    return torch.outer(positions.double(), THETA**-exponent)


def video_angles(
    start_frame: int, frames: int, height: int, width: int, head_dim: int, device: torch.device
) -> Tensor:
    """Angles of a video grid in (frame, row, column) order: ``[frames * height * width, head_dim / 2]`` float64."""
    spatial = 2 * (head_dim // 6)
    t = angles(torch.arange(start_frame, start_frame + frames, device=device), head_dim - 2 * spatial)
    h = angles(torch.arange(height, device=device), spatial)
    w = angles(torch.arange(width, device=device), spatial)
    grid = (frames, height, width, -1)
    return torch.cat(
        [t[:, None, None].expand(grid), h[None, :, None].expand(grid), w[None, None].expand(grid)], dim=-1
    ).flatten(0, 2)


def line_angles(start: int, count: int, head_dim: int, device: torch.device) -> Tensor:
    """Angles of ``count`` tokens on a line from position ``start``: ``[count, head_dim / 2]`` float64."""
    return angles(torch.arange(start, start + count, device=device), head_dim)


def rotation(angle: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``[L, head_dim / 2]``, as ``[1, L, 1, head_dim / 2]`` to meet ``[B, L, heads, d]``."""
    return angle.cos().to(dtype)[None, :, None], angle.sin().to(dtype)[None, :, None]


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate neighbouring channel pairs of ``x`` ``[B, L, heads, head_dim]``; computed in float32 at least."""
    cos, sin = cos_sin
    wide = x if x.dtype == torch.float64 else x.float()
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)

"""Joint flow matching of video and actions (the published objective).

``x_t = (1 - sigma) x + sigma eps``; the model predicts the velocity ``eps - x``. Times are drawn uniformly over the
points of a shifted schedule: one for frame 0, one a block, shared by the block's frames and actions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dreamzero_sft.layout import Layout
from flywheel_shared.recipe import Section

POINTS = 1000  # of the training schedule; times run over [0, 1000]


class ObjectiveSettings(Section):
    """Weights of the two terms and the schedule's shift (published: 1, 1 and 5)."""

    video_weight: float = 1.0
    action_weight: float = 1.0
    shift: float = 5.0


class Schedule:
    """The training schedule: noise levels, times and loss weights of its 1000 points.

    ``sigma = s u / (1 + (s - 1) u)`` for ``u`` from 1 down to 1/1000 and shift ``s``. The weight is a Gaussian bump
    ``exp(-2 ((t - 500) / 1000)^2)``, shifted to 0 at its minimum and scaled to mean 1 over the points.
    """

    def __init__(self, shift: float, device: torch.device | None = None) -> None:
        u = torch.arange(POINTS, 0, -1, dtype=torch.float64, device=device) / POINTS
        self.sigma = shift * u / (1 + (shift - 1) * u)
        bump = torch.exp(-2 * ((POINTS * self.sigma - POINTS / 2) / POINTS) ** 2)
        bump = bump - bump.min()
        self.weight = bump / bump.mean()

    def at(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sigma, time ``1000 sigma`` and weight (float32) of points ``index [...]`` int64."""
        sigma = self.sigma[index].float()
        return sigma, POINTS * sigma, self.weight[index].float()


@dataclass
class Batch:
    """Model-ready tensors of one micro-batch.

    Attributes:
        latents: clean video latents ``[B, C, 1 + N f, H, W]``.
        actions: normalised, padded actions ``[B, N A, action_dim]``.
        action_mask: ``[B, N A, action_dim]`` bool, False on padded dims and past an episode's end.
        state: normalised, padded states ``[B, N S, max_state_dim]``.
        context: text features ``[B or 1, T, text_dim]``.
        clip_feature: image features ``[B, I, clip_dim]``.
        frame_mask: ``[B, 1 + N f]`` bool, False past an episode's end.
        y: mask and first-frame latents ``[B, Cy, 1 + N f, H, W]`` or None.
    """

    latents: Tensor
    actions: Tensor
    action_mask: Tensor
    state: Tensor
    context: Tensor
    clip_feature: Tensor
    frame_mask: Tensor
    y: Tensor | None = None


def draw_points(batch: int, blocks: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Schedule points of frame 0 and of every block: ``[B, 1 + N]`` int64, uniform."""
    return torch.randint(POINTS, (batch, 1 + blocks), generator=generator, device=device)


def _weighted_mean(error: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``error * weight`` over the masked entries; zero where there is none."""
    kept = mask.to(error.dtype)
    return (error * weight * kept).sum() / kept.sum().clamp_min(1)


def flow_matching_loss(
    model: torch.nn.Module,
    batch: Batch,
    schedule: Schedule,
    settings: ObjectiveSettings,
    layout: Layout,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Losses of one micro-batch as float32 scalars: ``loss``, ``loss/video``, ``loss/action``.

    Padded action dims and frames or actions past an episode's end count in no term. The published code averages
    actions over all 32 padded dims, which dilutes a 7-wide action by 7/32; here the mean is over real dims.
    """
    device = batch.latents.device
    size, n = batch.latents.shape[0], layout.blocks
    points = draw_points(size, n, generator, device)
    per_frame = torch.cat(
        (points[:, :1], points[:, 1:].repeat_interleave(layout.frames_per_block, dim=1)), dim=1
    )
    per_action = points[:, 1:].repeat_interleave(layout.actions_per_block, dim=1)
    sigma_v, time_v, weight_v = schedule.at(per_frame)
    sigma_a, time_a, weight_a = schedule.at(per_action)

    noise_v = torch.randn(batch.latents.shape, generator=generator, device=device)
    noise_a = torch.randn(batch.actions.shape, generator=generator, device=device)
    sv, sa = sigma_v[:, None, :, None, None], sigma_a[:, :, None]
    noisy_v = (1 - sv) * batch.latents + sv * noise_v
    noisy_a = (1 - sa) * batch.actions + sa * noise_a

    video, action = model(
        noisy_v,
        batch.latents,
        time_v,
        noisy_a,
        time_a,
        batch.state,
        batch.context,
        batch.clip_feature,
        batch.y,
    )
    error_v = (video.float() - (noise_v - batch.latents)).square().mean(dim=(1, 3, 4))
    error_a = (action.float() - (noise_a - batch.actions)).square()
    frame_mask = batch.frame_mask
    if not layout.noisy_first_frame:
        frame_mask = torch.cat((torch.zeros_like(frame_mask[:, :1]), frame_mask[:, 1:]), dim=1)
    loss_v = _weighted_mean(error_v, weight_v, frame_mask)
    loss_a = _weighted_mean(error_a, weight_a[:, :, None].expand_as(error_a), batch.action_mask)
    total = settings.video_weight * loss_v + settings.action_weight * loss_a
    return {"loss": total, "loss/video": loss_v.detach(), "loss/action": loss_a.detach()}

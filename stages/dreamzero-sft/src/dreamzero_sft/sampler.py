"""Denoise one block: future video and an action chunk, from one observed frame."""

from typing import Any

import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from dreamzero_sft.model import WorldActionModel
from dreamzero_sft.recipe import SamplerSettings


def schedulers(settings: SamplerSettings) -> tuple[Any, Any]:
    """Two UniPC schedulers of order 2 over the shifted flow schedule: for video and for actions."""
    made: list[Any] = []
    for _ in range(2):
        scheduler: Any = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=settings.shift, solver_order=2
        )
        scheduler.set_timesteps(settings.steps)
        made.append(scheduler)
    return made[0], made[1]


@torch.no_grad()
def sample_block(
    model: WorldActionModel,
    latent: Tensor,
    state: Tensor,
    context: Tensor,
    clip_feature: Tensor,
    settings: SamplerSettings,
    negative_context: Tensor | None = None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample the block after an observed frame.

    Args:
        model: the policy.
        latent: latents of the observed frame ``[B, C, 1, H, W]``.
        state: normalised state ``[B, S, max_state_dim]``.
        context: text features ``[B or 1, T, text_dim]``.
        clip_feature: image features ``[B, I, clip_dim]``.
        settings: steps, shift, guidance and seed.
        negative_context: text features of the empty prompt, needed where guidance is not 1. Guidance acts on the
            video only; actions follow the conditional branch.
        y: mask and first-frame latents of frame 0 and the block ``[B, Cy, 1 + f, H, W]``, where needed.

    Returns:
        Latents of the block ``[B, C, f, H, W]`` and normalised actions ``[B, A, action_dim]``.
    """
    s = model.settings
    batch, channels, _, height, width = latent.shape
    generator = torch.Generator(latent.device).manual_seed(settings.seed)
    shape = (batch, channels, s.num_frame_per_block, height, width)
    video = torch.randn(shape, generator=generator, device=latent.device)
    action = torch.randn(
        (batch, s.num_action_per_block, s.action_dim), generator=generator, device=latent.device
    )
    branches = (
        [context] if settings.guidance == 1 or negative_context is None else [context, negative_context]
    )
    encoded = [model.encode_context(c, clip_feature) for c in branches]
    caches = [model.new_cache() for _ in branches]
    for cache, ctx in zip(caches, encoded, strict=True):
        model.observe(latent, 0, cache, ctx, None if y is None else y[:, :, :1])

    video_scheduler, action_scheduler = schedulers(settings)
    # The scheduler's own times are cut to whole numbers; the model is told the noise level that there is.
    for time, sigma in zip(video_scheduler.timesteps, video_scheduler.sigmas.tolist(), strict=False):
        times_v = torch.full((batch, s.num_frame_per_block), 1000 * sigma, device=latent.device)
        times_a = torch.full((batch, s.num_action_per_block), 1000 * sigma, device=latent.device)
        block_y = None if y is None else y[:, :, 1:]
        velocities = [
            model.denoise(video, times_v, action, times_a, state, 1, cache, ctx, block_y)
            for cache, ctx in zip(caches, encoded, strict=True)
        ]
        velocity_v, velocity_a = velocities[0]
        if len(velocities) == 2:
            negative = velocities[1][0]
            velocity_v = negative + settings.guidance * (velocity_v - negative)
        video = video_scheduler.step(velocity_v, time, video, return_dict=False)[0]
        action = action_scheduler.step(velocity_a, time, action, return_dict=False)[0]
    return video, action

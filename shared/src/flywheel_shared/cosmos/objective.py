"""Flow matching on packed samples: noise what is to be made, predict the velocity from data to noise.

With noise level s: `x = s * noise + (1 - s) * data`, target `noise - data` (cosmos-framework; facts as published).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from flywheel_shared.cosmos.sequence import Packed, Sample, pack
from flywheel_shared.recipe import Section

# Shift of the schedule by the shorter side of the picture, in pixels.
_SHIFTS = ((256, 3.0), (480, 5.0), (720, 10.0))


class ObjectiveSettings(Section):
    """Noise levels and weights.

    Attributes:
        levels: how a raw level is drawn: waver (video) or the logistic of a normal draw (images, actions).
        shift: of the schedule; None takes it by resolution: 3 up to 256 pixels, 5 up to 480, 10 beyond.
        video_weight, action_weight: of the two terms.
        mean_over: what a sample's mean runs over: all its elements, clean ones counting as zero (as
            cosmos-framework does), or those to be made.
    """

    levels: Literal["waver", "logit_normal"] = "waver"
    shift: float | None = Field(default=None, gt=0)
    video_weight: float = Field(default=1.0, ge=0)
    action_weight: float = Field(default=10.0, ge=0)
    mean_over: Literal["all", "made"] = "all"


def draw_levels(count: int, settings: ObjectiveSettings, short_side: int, device: torch.device) -> Tensor:
    """Noise levels `[count]` in [0, 1], float32, from PyTorch's global generator."""
    if settings.levels == "waver":
        raw = waver(torch.rand(count, device=device))
    else:
        raw = torch.randn(count, device=device).sigmoid()
    shift = shift_of(short_side) if settings.shift is None else settings.shift
    return shift * raw / (1 + (shift - 1) * raw)


def waver(u: Tensor) -> Tensor:
    """`1 - u - 1.29 (cos^2(pi u / 2) - 1 + u)` for u in [0, 1]."""
    return 1 - u - 1.29 * ((math.pi / 2 * u).cos().square() - 1 + u)


def shift_of(short_side: int) -> float:
    """Shift of the schedule for pictures of this shorter side in pixels."""
    return next((shift for side, shift in _SHIFTS if short_side <= side), _SHIFTS[-1][1])


def add_noise(
    samples: Sequence[Sample], levels: Tensor
) -> tuple[list[Sample], list[tuple[Tensor, Tensor | None]]]:
    """Noised samples, and for each the target velocities of its latents and actions."""
    noised, targets = [], []
    for sample, level in zip(samples, levels, strict=True):
        latents = sample.latents.float()
        noise = torch.randn_like(latents)
        made = torch.zeros(latents.shape[1], device=latents.device)
        made[sample.noisy_frames] = 1
        mask = level * made[:, None, None]
        changes: dict[str, Tensor] = {"latents": torch.lerp(latents, noise, mask)}
        action_target = None
        if sample.actions is not None:
            actions = sample.actions.float()
            action_noise = torch.randn_like(actions)
            action_noise[:, sample.action_dim :] = 0
            noisy = actions.clone()
            noisy[sample.rows_made] = torch.lerp(actions, action_noise, level)[sample.rows_made]
            changes["actions"] = noisy
            action_target = action_noise - actions
        noised.append(replace(sample, **changes))  # type: ignore[arg-type]
        targets.append((noise - latents, action_target))
    return noised, targets


def flow_matching_loss(
    model: nn.Module, samples: Sequence[Sample], settings: ObjectiveSettings, short_side: int
) -> dict[str, Tensor]:
    """Loss of one packed batch: "loss" and its terms "video" and "action", means over the samples.

    `model` takes a `Packed` batch, and has the transformer's `config`.
    """
    device = samples[0].latents.device
    levels = draw_levels(len(samples), settings, short_side, device)
    noised, targets = add_noise(samples, levels)
    packed: Packed = pack(noised, levels, model.config)
    videos, actions = model(packed)
    video_terms, action_terms = [], []
    predicted_actions = iter(actions)
    for sample, video, (target, action_target) in zip(samples, videos, targets, strict=True):
        # Parts that are given clean are predicted as zero, and count as zero.
        counted = target.shape[1] if sample.counted_frames is None else sample.counted_frames
        frames = [frame for frame in sample.noisy_frames if frame < counted]
        error = (video[0].float()[:, frames] - target[:, frames]).square().sum()
        video_terms.append(error / _elements(target[:, :1].numel(), counted, len(frames), settings))
        if action_target is not None:
            counted = len(action_target) if sample.counted_rows is None else sample.counted_rows
            rows, own = slice(sample.rows_made.start, counted), slice(sample.action_dim)
            error = (next(predicted_actions).float()[rows, own] - action_target[rows, own]).square().sum()
            made = max(0, rows.stop - rows.start)
            action_terms.append(error / _elements(sample.action_dim, counted, made, settings))
    video_term = torch.stack(video_terms).mean()
    action_term = torch.stack(action_terms).sum() / len(samples) if action_terms else video_term.new_zeros(())
    loss = settings.video_weight * video_term + settings.action_weight * action_term
    return {"loss": loss, "video": video_term, "action": action_term}


def _elements(in_one: int, counted: int, made: int, settings: ObjectiveSettings) -> int:
    """What a sample's sum is divided by; `in_one`: elements of a frame or row."""
    return max(1, in_one * (counted if settings.mean_over == "all" else made))

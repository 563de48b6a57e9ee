"""Sampling: what a clip leaves open, video and actions together, from noise by UniPC in a few steps.

All samples of a call are one flat state, so that one solver moves them all, whatever their shapes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler
from pydantic import Field
from torch import Tensor

from flywheel_shared.cosmos.model import CosmosModel
from flywheel_shared.cosmos.objective import shift_of
from flywheel_shared.cosmos.sequence import TIMESTEPS, Sample, pack
from flywheel_shared.recipe import Section


class SamplerSettings(Section):
    """Steps, the schedule's shift (None: by resolution, as in training) and guidance (1 = off)."""

    steps: int = Field(default=35, ge=1)
    shift: float | None = Field(default=None, gt=0)
    guidance: float = Field(default=1.0, ge=0)


@torch.no_grad()
def sample_clips(
    model: CosmosModel,
    samples: Sequence[Sample],
    seeds: Sequence[int],
    settings: SamplerSettings,
    short_side: int,
    negatives: Sequence[Tensor] | None = None,
) -> list[Sample]:
    """Make the noisy parts of samples; returns the samples with them filled in.

    Args:
        model: in evaluation mode.
        samples: what is given (clean frames, clean actions); what their noisy parts hold does not matter.
        seeds: of each sample's noise: a sample comes out the same alone and among others.
        settings: steps, shift and guidance.
        short_side: of the picture in pixels; decides the shift where none is set.
        negatives: token ids of each sample's negative prompt, needed where guidance is not 1.
    """
    parts = [_OpenParts(sample) for sample in samples]
    state = torch.cat([part.noise(seed) for part, seed in zip(parts, seeds, strict=True)])[None]
    sizes = [part.size for part in parts]
    guided = settings.guidance != 1
    if guided and negatives is None:
        raise ValueError("guidance needs negative prompts")
    scheduler: Any = UniPCMultistepScheduler(
        num_train_timesteps=TIMESTEPS,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift_of(short_side) if settings.shift is None else settings.shift,
        solver_order=2,
    )
    scheduler.set_timesteps(settings.steps)
    # The scheduler's own times are cut to whole numbers; the model is told the noise level that there is.
    for time, level in zip(scheduler.timesteps, scheduler.sigmas.tolist(), strict=False):
        noised = [part.filled(x) for part, x in zip(parts, state[0].split(sizes), strict=True)]
        asked = list(noised)
        if guided and negatives is not None:
            asked += [replace(s, text_ids=ids) for s, ids in zip(noised, negatives, strict=True)]
        videos, actions = model(pack(asked, [level] * len(asked), model.config))
        acting = iter(actions)
        velocities = [
            part.velocity(video, next(acting) if part.sample.actions is not None else None)
            for part, video in zip(parts * (1 + guided), videos, strict=True)
        ]
        velocity = torch.cat(velocities[: len(parts)])
        if guided:
            negative = torch.cat(velocities[len(parts) :])
            velocity = negative + settings.guidance * (velocity - negative)
        state = scheduler.step(velocity[None], time, state, return_dict=False)[0]
    return [part.filled(x) for part, x in zip(parts, state[0].split(sizes), strict=True)]


class _OpenParts:
    """Between a sample and the flat float32 vector of what is to be made of it."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        channels, _, height, width = sample.latents.shape
        self._frames = sample.noisy_frames
        self._video_shape = (channels, len(self._frames), height, width)
        self._video = channels * len(self._frames) * height * width
        self._rows = sample.rows_made
        self._action_shape = (self._rows.stop - self._rows.start, sample.action_dim)
        self.size = self._video + self._action_shape[0] * sample.action_dim

    def noise(self, seed: int) -> Tensor:
        """Drawn on the CPU: a seed gives the same clip on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.size, generator=generator).to(self.sample.latents.device)

    def filled(self, flat: Tensor) -> Sample:
        """The sample with the vector's contents in its open places."""
        latents = self.sample.latents.float().clone()
        latents[:, self._frames] = flat[: self._video].view(self._video_shape)
        changes: dict[str, Tensor] = {"latents": latents}
        if self.sample.actions is not None and self._action_shape[0]:
            actions = self.sample.actions.float().clone()
            actions[self._rows] = 0
            actions[self._rows, : self.sample.action_dim] = flat[self._video :].view(self._action_shape)
            changes["actions"] = actions
        return replace(self.sample, **changes)  # type: ignore[arg-type]

    def velocity(self, video: Tensor, actions: Tensor | None) -> Tensor:
        """The model's outputs at the open places, flat."""
        flat = video[0].float()[:, self._frames].flatten()
        if actions is None or not self._action_shape[0]:
            return flat
        own = actions.float()[self._rows, : self.sample.action_dim]
        return torch.cat((flat, own.flatten()))

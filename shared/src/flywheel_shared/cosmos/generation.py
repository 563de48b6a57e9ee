"""Clips from prompts, first frames or first seconds: what a videos API and a labeller call."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from flywheel_shared.cosmos.export import Export
from flywheel_shared.cosmos.sampler import SamplerSettings, sample_clips
from flywheel_shared.cosmos.sequence import TEMPORAL, Sample
from flywheel_shared.errors import UserError


@dataclass(frozen=True)
class VideoRequest:
    """One clip to make.

    Attributes:
        prompt, negative_prompt: what to show, and what to keep away from (used where guidance is not 1).
        width, height: pixels.
        num_frames: 1 + 4k.
        fps: frames a second.
        seed: of the noise; the same request gives the same clip.
        num_inference_steps: denoising steps.
        guidance_scale: 1 is off.
        frames: uint8 `[T, H, W, 3]` that the clip begins with: 1 for image-to-video, more for video-to-video,
            None for text-to-video. Another size is scaled and cut at the sides.
    """

    prompt: str
    width: int
    height: int
    num_frames: int
    fps: float
    seed: int
    num_inference_steps: int
    guidance_scale: float
    negative_prompt: str = ""
    frames: np.ndarray | None = None


@dataclass(frozen=True)
class VideoDefaults:
    """What a request takes where it does not say: the clips that the model was trained on."""

    width: int
    height: int
    num_frames: int
    fps: float
    num_inference_steps: int
    guidance_scale: float


class VideoGenerator:
    """An export that makes clips."""

    def __init__(self, export: Export) -> None:
        self._export = export
        self.name = export.config.run
        clip, sampler = export.config.clip, export.config.sampler
        self.defaults = VideoDefaults(
            clip.width, clip.height, clip.num_frames, clip.fps, sampler.steps, sampler.guidance
        )

    @classmethod
    def load(cls, export: Path, device: str = "cpu") -> Self:
        """Read an export; raises `UserError` where it is none."""
        return cls(Export.load(export, torch.device(device)))

    def check(self, request: VideoRequest) -> None:
        """Raise `UserError` for a request that cannot be met: the reason names the field."""
        patch = self._export.tokenizer.patch
        for name in ("width", "height"):
            side = getattr(request, name)
            if side < patch or side % patch:
                raise UserError(f"{name}: found {side}; allowed: multiples of {patch}")
        if request.num_frames < 1 or (request.num_frames - 1) % TEMPORAL:
            raise UserError(f"num_frames: found {request.num_frames}; allowed: 1 + {TEMPORAL} * k")
        if not 0 < request.fps <= 1000:
            raise UserError(f"fps: found {request.fps}; allowed: above 0, up to 1000")
        if request.num_inference_steps < 1:
            raise UserError(f"num_inference_steps: found {request.num_inference_steps}; allowed: 1 or more")
        if request.guidance_scale < 0:
            raise UserError(f"guidance_scale: found {request.guidance_scale}; allowed: 0 or more")
        frames = request.frames
        if frames is not None:
            if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
                raise UserError(
                    f"frames: found {frames.dtype} {list(frames.shape)}; allowed: uint8 [T, H, W, 3]"
                )
            if _given(frames) >= request.num_frames > 1:
                raise UserError(
                    f"frames: {len(frames)} are given, the clip has {request.num_frames}: nothing is left to make"
                )
        for prompt in (request.prompt, request.negative_prompt):
            self._ids(prompt, request)

    def generate(self, requests: Sequence[VideoRequest]) -> list[np.ndarray]:
        """Clips, uint8 `[T, H, W, 3]` each; requests of one number of steps and one guidance go together."""
        first = requests[0]
        for request in requests:
            self.check(request)
        settings = self._export.config.sampler.model_copy(
            update={"steps": first.num_inference_steps, "guidance": first.guidance_scale}
        )
        return self._sample(requests, settings)

    def _sample(self, requests: Sequence[VideoRequest], settings: SamplerSettings) -> list[np.ndarray]:
        negatives = None
        if settings.guidance != 1:
            negatives = [self._ids(request.negative_prompt, request) for request in requests]
        made = sample_clips(
            self._export.model,
            [self._open(request) for request in requests],
            [request.seed for request in requests],
            settings,
            min(requests[0].height, requests[0].width),
            negatives,
        )
        clips = []
        for sample in made:
            frames = self._export.tokenizer.decode(sample.latents[None])[0]
            pixels = ((frames + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
            clips.append(pixels.permute(1, 2, 3, 0).cpu().numpy())
        return clips

    def _open(self, request: VideoRequest) -> Sample:
        """A sample whose first latents are those of the given frames."""
        tokenizer, device = self._export.tokenizer, self._export.device
        shape = (
            tokenizer.channels,
            1 + (request.num_frames - 1) // TEMPORAL,
            request.height // tokenizer.patch,
            request.width // tokenizer.patch,
        )
        latents = torch.zeros(shape, device=device)
        given = 0
        if request.frames is not None:
            kept = min(_given(request.frames), request.num_frames)
            frames = torch.from_numpy(np.ascontiguousarray(request.frames[:kept])).permute(0, 3, 1, 2)
            video = fit(frames, request.height, request.width).transpose(0, 1)[None].to(device)
            encoded = tokenizer.encode(video)[0]
            given = encoded.shape[1]
            latents[:, :given] = encoded
        ids = self._ids(request.prompt, request)
        return Sample(ids, latents, request.fps, tuple(range(given)))

    def _ids(self, prompt: str, request: VideoRequest) -> Tensor:
        prompts = self._export.prompts
        if prompt:
            prompt = prompts.describe(prompt, request.num_frames, request.fps, request.height, request.width)
        return prompts.ids(prompt)


def fit(frames: Tensor, height: int, width: int) -> Tensor:
    """Scale uint8 `[T, C, H, W]` until it covers the size, keeping its aspect, and cut out the middle."""
    if frames.shape[-2:] == (height, width):
        return frames
    scale = max(height / frames.shape[-2], width / frames.shape[-1])
    size = (max(height, round(frames.shape[-2] * scale)), max(width, round(frames.shape[-1] * scale)))
    scaled = interpolate(frames.float(), size, mode="bilinear", antialias=True, align_corners=False)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return scaled[..., top : top + height, left : left + width].round().clamp(0, 255).to(torch.uint8)


def _given(frames: np.ndarray) -> int:
    """Frames that whole latents hold: 1 + 4k of them."""
    return 1 + (len(frames) - 1) // TEMPORAL * TEMPORAL

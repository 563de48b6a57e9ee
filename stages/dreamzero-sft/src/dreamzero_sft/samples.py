"""Windows of a corpus to model-ready batches."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dreamzero_sft.conditioning import Conditioner
from dreamzero_sft.objective import Batch
from dreamzero_sft.recipe import Recipe
from dreamzero_sft.transforms import Transform
from flywheel_shared.lerobot_windows import EpisodeWindows, ShuffledBatches
from flywheel_shared.video import LinearVideoTokenizer
from flywheel_shared.views import side_by_side


def open_windows(recipe: Recipe, corpus: Any, transform: Transform) -> EpisodeWindows:
    """The corpus' windows as the recipe cuts them; pictures are resized once an episode."""
    return EpisodeWindows(
        corpus,
        cameras=recipe.views.cameras,
        frame_offsets=recipe.frame_offsets,
        state_offsets=recipe.state_offsets,
        action_offsets=recipe.action_offsets,
        state_key=recipe.data.state_key,
        action_key=recipe.data.action_key,
        cache_gib=recipe.data.cache_gib,
        frame_transform=transform.resize,
    )


class Collator:
    """Raw windows to a `Batch`: pictures side by side and tokenised, numbers normalised, prompts encoded."""

    def __init__(
        self, recipe: Recipe, transform: Transform, tokenizer: LinearVideoTokenizer, conditioner: Conditioner
    ) -> None:
        self.recipe = recipe
        self.transform = transform
        self.tokenizer = tokenizer
        self.conditioner = conditioner

    @torch.no_grad()
    def __call__(self, windows: dict[str, Any], device: torch.device) -> Batch:
        """A batch on ``device`` from what ``EpisodeWindows.batch`` returns."""
        t, recipe = self.transform, self.recipe
        video = side_by_side([windows["frames"][camera].to(device) for camera in recipe.views.cameras])
        latents = self.tokenizer.encode(video)
        actions = t.action.normalise(windows["actions"]).to(device)
        real_dim = torch.arange(actions.shape[-1], device=device) < t.action.dim
        prompts = [recipe.data.prompt_template.format(instruction=task) for task in windows["task"]]
        return Batch(
            latents=latents,
            actions=actions,
            action_mask=windows["action_valid"].to(device)[:, :, None] & real_dim,
            state=t.state.normalise(windows["state"]).to(device),
            context=self.conditioner.encode_prompts(prompts),
            clip_feature=self.conditioner.encode_image(video[:, :, 0]),
            frame_mask=latent_mask(windows["frame_valid"].to(device), recipe.tokenizer.temporal),
            y=first_frame_condition(latents) if recipe.model.concat_first_frame_latent else None,
        )


def latent_mask(frame_valid: Tensor, temporal: int) -> Tensor:
    """Which latents rest on real frames only: ``[B, 1 + k temporal] -> [B, 1 + k]`` bool."""
    blocks = frame_valid[:, 1:].unflatten(1, (-1, temporal)).all(-1)
    return torch.cat((frame_valid[:, :1], blocks), dim=1)


def first_frame_condition(latents: Tensor) -> Tensor:
    """Wan's image condition: 4 mask channels (1 at frame 0) and the first frame's latents, zero elsewhere.

    ``[B, C, F, H, W] -> [B, 4 + C, F, H, W]``.
    """
    mask = torch.zeros_like(latents[:, :1]).expand(-1, 4, -1, -1, -1).clone()
    mask[:, :, 0] = 1
    first = torch.zeros_like(latents)
    first[:, :, 0] = latents[:, :, 0]
    return torch.cat((mask, first), dim=1)


class TrainingBatches:
    """Endless batches of one rank with an exact position."""

    def __init__(self, shuffled: ShuffledBatches, collate: Collator, device: torch.device) -> None:
        self.shuffled = shuffled
        self.collate = collate
        self.device = device

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.collate(next(self.shuffled), self.device)

    def state_dict(self) -> dict[str, Any]:
        """Position in the data."""
        return self.shuffled.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        self.shuffled.load_state_dict(state)

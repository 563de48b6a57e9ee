"""Windows to the samples of a packed micro-batch: decoded, prompted, tokenised, some frames given."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flywheel_shared.cosmos.export import VideoTokenizer
from flywheel_shared.cosmos.sequence import TEMPORAL, Sample
from flywheel_shared.cosmos.text import PromptTokenizer
from flywheel_shared.errors import UserError
from vision_sft.clips import ClipWindows, Faulty, Window, check_share
from vision_sft.frames import WindowFrames
from vision_sft.packing import PackedBatches, PackedOrder
from vision_sft.recipe import Recipe


@dataclass(frozen=True)
class Decoded:
    """One window as it comes from the disk: uint8 `[T, C, H, W]` and its prompt's token ids."""

    frames: Tensor
    ids: Tensor
    fps: float


class Windows:
    """All windows with their token counts; oversized ones and those that cannot be decoded are told."""

    def __init__(self, found: ClipWindows, recipe: Recipe, prompts: PromptTokenizer, patch: int) -> None:
        """Count tokens.

        Raises `UserError` where the share of windows that are faulty or do not fit the budget is too large.
        """
        self._settings = recipe.data
        self._frames = WindowFrames(recipe.data.cache_gib)
        self.total = len(found.windows) + len(found.faults)
        self.faults = list(found.faults)
        self.windows: list[Window] = []
        self.costs: list[int] = []
        self._ids: list[Tensor] = []
        self._bad: set[int] = set()
        side = patch * recipe.model.latent_patch_size
        for window in found.windows:
            if window.height % patch or window.width % patch:
                self.faults.append(
                    f"{window.video}: {window.height} x {window.width}: sides must be multiples of {patch}"
                )
                continue
            try:
                ids = prompts.ids(prompt_of(window, prompts))
            except UserError as error:
                self.faults.append(f"{window.video}: {error}")
                continue
            latents = 1 + (len(window.frames) - 1) // TEMPORAL
            tokens = len(ids) + latents * -(-window.height // side) * -(-window.width // side)
            if tokens > recipe.data.token_budget:
                self.faults.append(
                    f"{window.video}: oversized: {tokens} tokens, data.token_budget is {recipe.data.token_budget}"
                )
                continue
            self.windows.append(window)
            self.costs.append(tokens)
            self._ids.append(ids)
        check_share(self.faults, self.total, recipe.data.max_bad_share)
        if not self.windows:
            raise UserError(f"{found.windows[0].video}: no window to train on")

    def decode(self, numbers: Sequence[int]) -> list[Decoded] | None:
        """Those of the windows that can be decoded, None where none can.

        A broken file is said once and counted; raises `UserError` when their share becomes too large.
        """
        decoded = []
        for number in numbers:
            window = self.windows[number]
            if number in self._bad:
                continue
            try:
                decoded.append(Decoded(self._frames.get(number, window), self._ids[number], window.fps))
            except Faulty as fault:
                self._bad.add(number)
                self.faults.append(str(fault))
                print(f"skipped: {fault}", file=sys.stderr, flush=True)
                check_share(self.faults, self.total, self._settings.max_bad_share)
        return decoded or None


class TrainingBatches:
    """Endless packed micro-batches of samples on the device."""

    def __init__(
        self,
        windows: Windows,
        recipe: Recipe,
        prompts: PromptTokenizer,
        tokenizer: VideoTokenizer,
        device: torch.device,
        rank: int,
        world_size: int,
    ) -> None:
        data = recipe.data
        order = PackedOrder(
            windows.costs, data.token_budget, data.lookahead, recipe.trainer.seed, rank, world_size
        )
        self._packed: PackedBatches[list[Decoded]] = PackedBatches(order, windows.decode)
        self._tokenizer, self._device = tokenizer, device
        self._empty = prompts.ids("")
        self._dropout = data.caption_dropout
        self._conditioning = torch.tensor(data.conditioning)

    def __iter__(self) -> "TrainingBatches":
        return self

    def __next__(self) -> list[Sample]:
        """Samples with clean latents; which frames are given and which prompts are dropped is drawn here,
        from PyTorch's global generator, so that a resumed run draws the same.
        """
        decoded = next(self._packed)
        given = torch.multinomial(self._conditioning, len(decoded), replacement=True).tolist()
        dropped = (torch.rand(len(decoded)) < self._dropout).tolist()
        latents = encode([one.frames for one in decoded], self._tokenizer, self._device)
        samples = []
        for one, latent, count, empty in zip(decoded, latents, given, dropped, strict=True):
            clean = range(min(count, latent.shape[1] - 1))  # something is left to make
            samples.append(Sample(self._empty if empty else one.ids, latent, one.fps, tuple(clean)))
        return samples

    def state_dict(self) -> dict[str, Any]:
        """Position in the data."""
        return self._packed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        self._packed.load_state_dict(state)


def prompt_of(window: Window, prompts: PromptTokenizer) -> str:
    """A JSON caption as it is; prose with sentences on duration, rate and size where the settings say so."""
    if window.is_json:
        return window.caption
    return prompts.describe(window.caption, len(window.frames), window.fps, window.height, window.width)


@torch.no_grad()
def encode(clips: Sequence[Tensor], tokenizer: VideoTokenizer, device: torch.device) -> list[Tensor]:
    """Latents `[C, T, H, W]` of uint8 clips `[T, C, H, W]`; clips of one shape go together."""
    latents: dict[int, Tensor] = {}
    shapes: dict[torch.Size, list[int]] = {}
    for place, clip in enumerate(clips):
        shapes.setdefault(clip.shape, []).append(place)
    for places in shapes.values():
        video = torch.stack([clips[place] for place in places]).transpose(1, 2).to(device)
        latents |= dict(zip(places, tokenizer.encode(video), strict=True))
    return [latents[place] for place in range(len(clips))]

"""Samples, and their packing into the one sequence that Cosmos 3 reads.

Order: the text of all samples (the understanding stream), then the video and actions of each sample (the
generation stream). Position ids are diffusers' own, sample by sample.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import (
    get_3d_mrope_ids_text_tokens,
    get_3d_mrope_ids_vae_tokens,
)
from torch import Tensor

TEMPORAL = 4  # frames of a latent after the first, of the Wan VAE and of its stand-in alike
TIMESTEPS = 1000  # a noise level of 1 is this time step


@dataclass(frozen=True)
class Sample:
    """One clip with its prompt and, if it has any, actions.

    Attributes:
        text_ids: prompt tokens, int64 `[n]`, closed by end of sequence and start of vision.
        latents: float `[C, T, H, W]`.
        fps: frames a second of the video.
        clean_frames: latent frames that are given rather than made.
        actions: float `[rows, max_action_dim]`, zero beyond `action_dim`.
        action_dim: width of the embodiment's own rows.
        clean_rows: how many action rows, from the first on, are given rather than made.
        first_row: frame at which row 0 stands: 1 where row i holds the action that leads to frame i + 1, 0
            where a row for the start precedes those.
        domain_id: embodiment whose input and output weights the actions use.
        counted_frames, counted_rows: latent frames and action rows, from the first on, that count in a loss;
            what follows repeats the last one of its episode. None: all.
    """

    text_ids: Tensor
    latents: Tensor
    fps: float
    clean_frames: tuple[int, ...] = ()
    actions: Tensor | None = None
    action_dim: int = 0
    clean_rows: int = 0
    first_row: int = 1
    domain_id: int = 0
    counted_frames: int | None = None
    counted_rows: int | None = None

    @property
    def noisy_frames(self) -> list[int]:
        """Latent frames that are made."""
        return [i for i in range(self.latents.shape[1]) if i not in self.clean_frames]

    @property
    def rows_made(self) -> slice:
        """Action rows that are made."""
        count = 0 if self.actions is None else len(self.actions)
        return slice(min(self.clean_rows, count), count)

    def grid(self, patch: int) -> tuple[int, int, int]:
        """Vision tokens as (frames, rows, columns)."""
        _, frames, height, width = self.latents.shape
        return frames, -(-height // patch), -(-width // patch)


@dataclass(frozen=True)
class Layout:
    """Where samples lie in the packed streams.

    Attributes:
        text, generated: tokens of each sample in the understanding and in the generation stream.
        device: where the streams are.
    """

    text: tuple[int, ...]
    generated: tuple[int, ...]
    device: torch.device

    @functools.cached_property
    def keys(self) -> Tensor:
        """Order of keys for the generation stream: each sample's text, then its own generated tokens.

        Indices into the two streams joined, int64 `[all tokens]`, on the device once for all layers.
        """
        text, generated = _starts(self.text), _starts(self.generated)
        after = sum(self.text)
        parts = []
        for i, (t, g) in enumerate(zip(self.text, self.generated, strict=True)):
            parts += [
                torch.arange(text[i], text[i] + t),
                torch.arange(generated[i], generated[i] + g) + after,
            ]
        return torch.cat(parts).to(self.device)


@dataclass(frozen=True)
class Packed:
    """A packed batch: what the transformer takes, and where its samples lie."""

    inputs: dict[str, Any]
    layout: Layout


def pack(samples: Sequence[Sample], noise_levels: Sequence[float] | Tensor, config: Any) -> Packed:
    """Pack samples whose latents and actions are already noised.

    Args:
        samples: at least one; either all with actions or none, or mixed.
        noise_levels: sigma of each sample's noisy frames and actions, in [0, 1].
        config: the transformer's (patch size, position margins, base rate).
    """
    device = samples[0].latents.device
    patch = config.latent_patch_size
    ids = torch.cat([sample.text_ids for sample in samples]).to(device)
    levels = torch.as_tensor(noise_levels, dtype=torch.float32, device=device) * TIMESTEPS
    positions_text, positions_generated = [], []
    vision_at, vision_noisy_at, vision_frames, vision_counts = [], [], [], []
    action_at, action_noisy_at, action_rows, action_counts = [], [], [], []
    at = len(ids)
    generated = []
    for sample in samples:
        frames, rows, columns = grid = sample.grid(patch)
        in_frame = rows * columns
        offset = len(sample.text_ids) + config.unified_3d_mrope_temporal_modality_margin
        rate = sample.fps if config.enable_fps_modulation else None
        positions_text.append(_text_positions(len(sample.text_ids), config.enable_fps_modulation))
        positions_generated.append(_video_positions(*grid, offset, rate, config))
        noisy = torch.tensor(sample.noisy_frames, dtype=torch.int64)
        vision_at.append(torch.arange(at, at + frames * in_frame))
        vision_noisy_at.append(at + (noisy[:, None] * in_frame + torch.arange(in_frame)).flatten())
        vision_frames.append(noisy.to(device))
        vision_counts.append(len(noisy) * in_frame)
        length = frames * in_frame
        if sample.actions is not None:
            count, made = len(sample.actions), sample.rows_made
            positions_generated.append(_action_positions(count, sample.first_row, offset, rate, config))
            action_at.append(torch.arange(at + length, at + length + count))
            action_noisy_at.append(action_at[-1][made])
            action_rows.append(torch.arange(made.start, made.stop, device=device))
            action_counts.append(made.stop - made.start)
            length += count
        generated.append(length)
        at += length

    def spread(counts: list[int], which: Tensor) -> Tensor:
        return which.repeat_interleave(torch.tensor(counts, device=device))

    inputs: dict[str, Any] = {
        "input_ids": ids,
        "text_indexes": torch.arange(len(ids), device=device),
        "position_ids": torch.cat(positions_text + positions_generated, dim=1).to(device),
        "und_len": len(ids),
        "sequence_length": at,
        "vision_tokens": [sample.latents[None] for sample in samples],
        "vision_token_shapes": [sample.grid(patch) for sample in samples],
        "vision_sequence_indexes": torch.cat(vision_at).to(device),
        "vision_mse_loss_indexes": torch.cat(vision_noisy_at).to(device),
        "vision_timesteps": spread(vision_counts, levels),
        "vision_noisy_frame_indexes": vision_frames,
    }
    acting = [i for i, sample in enumerate(samples) if sample.actions is not None]
    if acting:
        inputs |= {
            "action_tokens": [samples[i].actions for i in acting],
            "action_token_shapes": [(len(samples[i].actions), 1, 1) for i in acting],  # type: ignore[arg-type]
            "action_sequence_indexes": torch.cat(action_at).to(device),
            "action_mse_loss_indexes": torch.cat(action_noisy_at).to(device),
            "action_timesteps": spread(action_counts, levels[acting]),
            "action_noisy_frame_indexes": action_rows,
            "action_domain_ids": [torch.tensor([samples[i].domain_id], device=device) for i in acting],
        }
    return Packed(inputs, Layout(tuple(len(sample.text_ids) for sample in samples), tuple(generated), device))


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@functools.lru_cache(maxsize=512)
def _text_positions(count: int, floating: bool) -> Tensor:
    return get_3d_mrope_ids_text_tokens(count, 0, floating)[0].float()


def _video_positions(
    frames: int, rows: int, columns: int, offset: int, rate: float | None, config: Any
) -> Tensor:
    reset = bool(config.unified_3d_mrope_reset_spatial_ids)
    return _grid_positions(frames, rows, columns, offset, rate, float(config.base_fps), reset, TEMPORAL, 0)


def _action_positions(count: int, first: int, offset: int, rate: float | None, config: Any) -> Tensor:
    """Row i stands where frame `first` + i does, on the video's clock."""
    reset = bool(config.unified_3d_mrope_reset_spatial_ids)
    return _grid_positions(count, 1, 1, offset, rate, float(config.base_fps), reset, 1, first)


@functools.lru_cache(maxsize=2048)
def _grid_positions(
    frames: int,
    rows: int,
    columns: int,
    offset: int,
    rate: float | None,
    base_rate: float,
    reset: bool,
    temporal: int,
    start: int,
) -> Tensor:
    """Position ids `[3, frames * rows * columns]`, float32."""
    ids, _ = get_3d_mrope_ids_vae_tokens(
        frames,
        rows,
        columns,
        offset,
        reset_spatial_indices=reset,
        fps=rate,
        base_fps=base_rate,
        temporal_compression_factor=temporal,
        base_temporal_compression_factor=TEMPORAL,
        start_frame_offset=start,
    )
    return ids.float()

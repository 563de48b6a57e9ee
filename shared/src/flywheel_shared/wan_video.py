"""The Wan video VAE of diffusers behind the interface of the linear video tokenizer."""

from pathlib import Path
from typing import Any, Self

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import Tensor, nn

from flywheel_shared.errors import UserError, one_line


class WanVideoTokenizer(nn.Module):
    """Frozen; latents are the encoder's means, shifted and scaled to unit variance by the VAE's own numbers.

    1 + 4k frames become 1 + k latents of `channels`, each for `patch` x `patch` pixels (16 and 48 for Wan 2.2).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, vae: Any) -> None:
        """Take an `AutoencoderKLWan`."""
        super().__init__()
        self.vae = vae.eval().requires_grad_(False)
        config = vae.config
        self.patch = int(config.scale_factor_spatial)
        self.temporal = int(config.scale_factor_temporal)
        self.channels = int(config.z_dim)
        shape = (1, self.channels, 1, 1, 1)
        self.register_buffer("mean", torch.tensor(config.latents_mean).view(shape), persistent=False)
        self.register_buffer("std", torch.tensor(config.latents_std).view(shape), persistent=False)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Self:
        """Read a diffusers folder (`vae/` of a Cosmos 3 or Wan repository); nothing is ever fetched."""
        inner = folder / "vae"
        path = inner if inner.is_dir() else folder
        if not (path / "config.json").is_file():
            raise UserError(f"{path}: no video VAE: config.json is missing")
        try:
            vae = AutoencoderKLWan.from_pretrained(str(path), torch_dtype=dtype, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{path}: cannot be read as a Wan video VAE: {one_line(str(error))[:200]}"
            ) from None
        return cls(vae)

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        """`[B, 3, 1 + 4k, H, W]`, uint8 or float in [-1, 1] -> float32 `[B, C, 1 + k, H/p, W/p]`."""
        time, height, width = frames.shape[2:]
        if (time - 1) % self.temporal or height % self.patch or width % self.patch:
            raise UserError(
                f"{time} frames of {height} x {width}: expected 1 + {self.temporal} * k frames, sides in "
                f"multiples of {self.patch}"
            )
        scaled = frames.float() / 127.5 - 1 if frames.dtype == torch.uint8 else frames.float()
        latents = self.vae.encode(scaled.to(self.vae.dtype)).latent_dist.mode().float()
        return (latents - self.mean) / self.std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """`[B, C, 1 + k, h, w]` -> float32 `[B, 3, 1 + 4k, h*p, w*p]` in [-1, 1]."""
        scaled = latents.float() * self.std + self.mean
        return self.vae.decode(scaled.to(self.vae.dtype), return_dict=False)[0].float().clamp(-1, 1)

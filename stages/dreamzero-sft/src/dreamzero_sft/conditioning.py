"""Frozen encoders of the prompt and of the first frame.

The real recipes use UMT5 and CLIP's vision tower; a laptop uses the same transformers classes with tiny
configurations, random weights made from a seed, and a byte-level tokenizer that needs no file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from flywheel_shared.errors import UserError
from flywheel_shared.recipe import Section

if TYPE_CHECKING:
    from transformers import CLIPVisionModel, UMT5EncoderModel

# Mean and deviation of CLIP's own preprocessing (openai/clip-vit-large-patch14's published preprocessor).
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class ConditioningSettings(Section):
    """Tiny encoders made from a seed."""

    text_len: int = 128
    text_dim: int = 64
    text_layers: int = 1
    image_size: int = 32
    image_patch: int = 16
    image_dim: int = 64
    image_layers: int = 1
    seed: int = 0


class Conditioner(nn.Module):
    """Prompt and first frame to the features that cross-attention reads. Frozen; float32."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, text_encoder: "UMT5EncoderModel", image_encoder: "CLIPVisionModel", text_len: int
    ) -> None:
        super().__init__()
        from transformers import ByT5Tokenizer

        self.text_encoder: Any = text_encoder.eval().requires_grad_(False)
        self.image_encoder: Any = image_encoder.eval().requires_grad_(False)
        self.text_len = text_len
        self.tokenizer = ByT5Tokenizer()
        self._prompts: dict[str, Tensor] = {}
        self.register_buffer("mean", torch.tensor(CLIP_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(CLIP_STD).view(3, 1, 1), persistent=False)

    @classmethod
    def from_settings(cls, settings: ConditioningSettings) -> "Conditioner":
        """Make the tiny encoders: same settings, same weights."""
        from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            text = UMT5EncoderModel(
                UMT5Config(
                    vocab_size=384,  # ByT5's bytes and special tokens
                    d_model=settings.text_dim,
                    d_kv=settings.text_dim // 4,
                    d_ff=2 * settings.text_dim,
                    num_layers=settings.text_layers,
                    num_heads=4,
                )
            )
            image = CLIPVisionModel(
                CLIPVisionConfig(
                    hidden_size=settings.image_dim,
                    intermediate_size=2 * settings.image_dim,
                    num_hidden_layers=settings.image_layers,
                    num_attention_heads=4,
                    image_size=settings.image_size,
                    patch_size=settings.image_patch,
                )
            )
        return cls(text, image, settings.text_len)

    def save(self, folder: Path) -> None:
        """Write both encoders as ``text_encoder/`` and ``image_encoder/`` in Hugging Face form."""
        self.text_encoder.save_pretrained(folder / "text_encoder")
        self.image_encoder.save_pretrained(folder / "image_encoder")

    @classmethod
    def load(cls, folder: Path, text_len: int) -> "Conditioner":
        """Read what ``save`` wrote; nothing is fetched.

        Raises:
            UserError: if an encoder is missing.
        """
        from transformers import CLIPVisionModel, UMT5EncoderModel

        for name in ("text_encoder", "image_encoder"):
            if not (folder / name / "config.json").is_file():
                raise UserError(
                    f"{folder}: no {name}/config.json: convert the checkpoint again with dcp-convert"
                )
        text = UMT5EncoderModel.from_pretrained(folder / "text_encoder", local_files_only=True)
        image = CLIPVisionModel.from_pretrained(folder / "image_encoder", local_files_only=True)
        return cls(text, image, text_len)

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """Text features ``[B, T, text_dim]``, or ``[1, T, text_dim]`` where all prompts are the same.

        Rows past a prompt's end are zero, prompt by prompt. A prompt is encoded once and kept.
        """
        for prompt in set(prompts) - self._prompts.keys():
            tokens = self.tokenizer(
                prompt, max_length=self.text_len, padding="max_length", truncation=True, return_tensors="pt"
            ).to(self.mean.device)
            hidden = self.text_encoder(**tokens).last_hidden_state
            self._prompts[prompt] = hidden[0] * tokens["attention_mask"][0, :, None]
        if len(set(prompts)) == 1:
            return self._prompts[prompts[0]][None]
        return torch.stack([self._prompts[prompt] for prompt in prompts])

    @torch.no_grad()
    def encode_image(self, frame: Tensor) -> Tensor:
        """Features of first frames ``[B, 3, H, W]`` in [-1, 1]: ``[B, I, image_dim]``, last layer but one as Wan.

        The frame is resized to the encoder's square.
        """
        size = self.image_encoder.config.image_size
        pixels = interpolate(
            (frame + 1) / 2, (size, size), mode="bilinear", antialias=True, align_corners=False
        )
        out = self.image_encoder((pixels - self.mean) / self.std, output_hidden_states=True)
        return out.hidden_states[-2]

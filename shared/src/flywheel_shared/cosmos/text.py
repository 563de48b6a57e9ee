"""Prompts to the token ids that Cosmos 3 reads: bytes on a laptop, the model's own chat template for real.

The transformer embeds the ids itself; there is no text encoder.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer, ByT5Tokenizer

from flywheel_shared.errors import UserError, one_line
from flywheel_shared.recipe import Section

BYTES = "bytes"
BYTES_VOCABULARY = 384  # ByT5's: 3 special ids, 256 bytes, 125 extra ids
_VISION_START = "<|vision_start|>"
_FILES = "tokenizer"  # folder of an export that holds a real tokenizer


class TextSettings(Section):
    """How prompts become tokens.

    Attributes:
        tokenizer: "bytes", or the folder of a Hugging Face tokenizer with a chat template (Cosmos 3's own).
        system_prompt: "video" puts the sentence before prompts that the published pipelines put there.
        describe: append sentences on duration, rate and size to prompts that are prose, as published.
        max_tokens: a longer prompt is an error.
    """

    tokenizer: str = BYTES
    system_prompt: Literal["none", "video"] = "none"
    describe: bool = True
    max_tokens: int = 2048


class PromptTokenizer:
    """Token ids of prompts, closed by end of sequence and start of vision."""

    def __init__(self, settings: TextSettings, export: Path | None = None) -> None:
        """Open the tokenizer, that kept in `export` where there is one; nothing is ever fetched."""
        self.settings = settings
        self._closing: list[int]
        self._tokenizer: Any
        if settings.tokenizer == BYTES:
            self._tokenizer = ByT5Tokenizer()
            self._closing = [self._tokenizer.eos_token_id, 3 + 256]  # the first extra id starts vision
            return
        kept = None if export is None else export / _FILES
        folder = kept if kept is not None and kept.is_dir() else Path(settings.tokenizer)
        if not folder.is_dir():
            raise UserError(f"text.tokenizer: {folder}: no such folder; name a tokenizer's, or {BYTES!r}")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(
                f"text.tokenizer: {folder}: cannot be read as a tokenizer: {one_line(str(error))[:200]}"
            ) from None
        start = self._tokenizer.convert_tokens_to_ids(_VISION_START)
        if start is None or start == self._tokenizer.unk_token_id or self._tokenizer.chat_template is None:
            raise UserError(
                f"text.tokenizer: {folder}: it lacks {_VISION_START} or a chat template: not Cosmos 3's"
            )
        self._closing = [self._tokenizer.eos_token_id, start]

    @property
    def vocabulary(self) -> int:
        """Ids are below this number."""
        return BYTES_VOCABULARY if self.settings.tokenizer == BYTES else len(self._tokenizer)

    def ids(self, prompt: str) -> Tensor:
        """Int64 `[n]`; raises `UserError` for a prompt beyond `max_tokens`."""
        if self.settings.tokenizer == BYTES:
            ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        else:
            messages = [{"role": "user", "content": prompt}]
            if self.settings.system_prompt == "video":
                sentence = "You are a helpful assistant who will generate videos from a give prompt."
                messages.insert(0, {"role": "system", "content": sentence})
            ids = self._tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, add_vision_id=False, return_dict=True
            )["input_ids"]
        ids = [*ids, *self._closing]
        if len(ids) > self.settings.max_tokens:
            raise UserError(
                f"prompt of {len(ids)} tokens, at most {self.settings.max_tokens} (text.max_tokens): {prompt[:60]!r}"
            )
        return torch.tensor(ids, dtype=torch.int64)

    def describe(self, prompt: str, num_frames: int, fps: float, height: int, width: int) -> str:
        """The prompt with sentences on duration, rate and size where the settings say so."""
        if not self.settings.describe:
            return prompt
        parts = [prompt.rstrip(".")] if prompt else []
        parts.append(f"The video is {num_frames / fps:.1f} seconds long and is of {fps:.0f} FPS")
        parts.append(f"This video is of {height}x{width} resolution.")
        return ". ".join(parts)

    def save(self, folder: Path) -> None:
        """Keep a real tokenizer's files in an export; bytes need none."""
        if self.settings.tokenizer != BYTES:
            self._tokenizer.save_pretrained(folder / _FILES)

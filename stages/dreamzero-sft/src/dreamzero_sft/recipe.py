"""The recipe of a run: what is trained, on what, and how. One TOML file, strictly read."""

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from dreamzero_sft.conditioning import ConditioningSettings
from dreamzero_sft.model import ModelSettings
from dreamzero_sft.objective import ObjectiveSettings
from dreamzero_sft.transforms import ViewSettings
from flywheel_shared.recipe import Section
from flywheel_shared.trainer import TrainerSettings


class DataSettings(Section):
    """The corpus and how windows are cut from it.

    Attributes:
        corpus: name of the corpus: ``<root>/corpus/<corpus>``; its statistics go to ``<root>/metadata/<corpus>``.
        embodiment: tag under which statistics are kept.
        state_key, action_key: dataset columns.
        blocks: causal blocks of a window.
        batch_size: windows of a micro-batch on one rank.
        cache_gib: memory for decoded episodes on one rank.
        prompt_template: prompt of the text encoder; ``{instruction}`` is the task.
    """

    corpus: str = "libero"
    embodiment: str = "libero_sim"
    state_key: str = "observation.state"
    action_key: str = "action"
    blocks: int = Field(default=4, ge=1)
    batch_size: int = Field(default=1, ge=1)
    cache_gib: float = Field(default=2.0, gt=0)
    prompt_template: str = "{instruction}"


class TokenizerSettings(Section):
    """The linear video tokenizer: spatial patch in pixels, frames of a latent, channels."""

    patch: int = 8
    temporal: int = 4
    channels: int = 16
    seed: int = 0


class SamplerSettings(Section):
    """Inference: UniPC steps, their schedule's shift, guidance on the video (1 = off) and the noise's seed."""

    steps: int = Field(default=16, ge=1)
    shift: float = 5.0
    guidance: float = 1.0
    seed: int = 1140


class ParallelSettings(Section):
    """Mesh axes; ``shard = -1`` takes what the others leave."""

    replicate: int = 1
    shard: int = -1


class Recipe(Section):
    """Everything `metadata`, `train` and `serve` need."""

    run: str
    data: DataSettings
    views: ViewSettings
    tokenizer: TokenizerSettings
    conditioning: ConditioningSettings
    model: ModelSettings
    objective: ObjectiveSettings = ObjectiveSettings()
    sampler: SamplerSettings = SamplerSettings()
    parallel: ParallelSettings = ParallelSettings()
    trainer: TrainerSettings

    @model_validator(mode="after")
    def _sizes_agree(self) -> "Recipe":
        m, t, v = self.model, self.tokenizer, self.views
        frames = m.num_frame_per_block * t.temporal
        if m.num_action_per_block % frames:
            raise ValueError(
                f"model.num_action_per_block = {m.num_action_per_block} must be a multiple of "
                f"num_frame_per_block x tokenizer.temporal = {frames}, so that frames fall on actions"
            )
        side = (t.patch * m.patch_size[1], t.patch * m.patch_size[2])
        if v.height % side[0] or (v.width * len(v.cameras)) % side[1]:
            raise ValueError(
                f"views {v.height} x {v.width} (x {len(v.cameras)} side by side) must be multiples of "
                f"tokenizer.patch x model.patch_size = {side[0]} x {side[1]} pixels"
            )
        if len(v.cameras) != len(v.request_keys):
            raise ValueError(
                f"views.cameras has {len(v.cameras)} keys, views.request_keys {len(v.request_keys)}"
            )
        first_frame = 4 + t.channels if m.concat_first_frame_latent else 0
        if m.in_dim != t.channels + first_frame or m.out_dim != t.channels:
            raise ValueError(
                f"model.in_dim = {m.in_dim}, out_dim = {m.out_dim} must be {t.channels + first_frame} and "
                f"{t.channels} for tokenizer.channels = {t.channels}"
            )
        if m.text_dim != self.conditioning.text_dim or m.clip_dim != self.conditioning.image_dim:
            raise ValueError(
                f"model.text_dim = {m.text_dim}, clip_dim = {m.clip_dim} must equal conditioning.text_dim = "
                f"{self.conditioning.text_dim}, image_dim = {self.conditioning.image_dim}"
            )
        return self

    @property
    def frame_step(self) -> int:
        """Actions between two pictures of a block."""
        return self.model.num_action_per_block // (self.model.num_frame_per_block * self.tokenizer.temporal)

    @property
    def frame_offsets(self) -> list[int]:
        """Rows of a window's pictures, the current row being 0: frame 0, then each block's, aligned with actions."""
        per_block = self.model.num_frame_per_block * self.tokenizer.temporal
        return [k * self.frame_step for k in range(1 + self.data.blocks * per_block)]

    @property
    def action_offsets(self) -> list[int]:
        """Rows of a window's actions."""
        return list(range(self.data.blocks * self.model.num_action_per_block))

    @property
    def state_offsets(self) -> list[int]:
        """Rows of a window's states: the first of each block."""
        return [i * self.model.num_action_per_block for i in range(self.data.blocks)]

    def corpus_folder(self, root: Path) -> Path:
        """Where the demonstrations lie."""
        return root / "corpus" / self.data.corpus

    def metadata_folder(self, root: Path) -> Path:
        """Where statistics and the fitted tokenizer lie."""
        return root / "metadata" / self.data.corpus

    def export_config(self, rate_hz: float) -> dict[str, Any]:
        """What `serve` must know, as saved in ``config.json``."""
        parts = ("run", "data", "views", "tokenizer", "conditioning", "model", "sampler")
        return {name: value for name, value in self.model_dump(mode="json").items() if name in parts} | {
            "format": "dreamzero-sft/1",
            "rate_hz": rate_hz,
        }

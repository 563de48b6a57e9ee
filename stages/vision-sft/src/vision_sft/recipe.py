"""The recipe of a run: what is trained, on which clips, and how. One TOML file, strictly read."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from flywheel_shared.cosmos.build import Trained
from flywheel_shared.cosmos.export import ClipSettings, ExportConfig, VideoTokenizerSettings
from flywheel_shared.cosmos.model import ModelSettings
from flywheel_shared.cosmos.objective import ObjectiveSettings
from flywheel_shared.cosmos.sampler import SamplerSettings
from flywheel_shared.cosmos.text import TextSettings
from flywheel_shared.recipe import Section
from flywheel_shared.trainer import TrainerSettings
from flywheel_shared.warm_start import WarmStartSettings


class DataSettings(Section):
    """Which clips, and how samples are made of them.

    Attributes:
        clips: names of folders: ``<root>/clips/<name>/train/video_dataset_file.jsonl``.
        tier: resolution tier (256, 480 or 720): each clip is scaled to the size of the tier that is closest
            to its aspect, and cut at the sides. None takes clips as they are.
        min_frames, max_frames: a shorter window is a fault; a longer one is cut.
        token_budget: most tokens of a rank's micro-batch, text and video together.
        lookahead: windows that may wait for a batch in which they fit.
        caption_dropout: share of samples without a prompt, for guidance.
        conditioning: shares of samples whose first 0, 1, 2, ... latent frames are given.
        max_bad_share: of windows that may be faulty before the run stops.
        cache_gib: memory for decoded windows on one rank.
    """

    clips: tuple[str, ...] = Field(min_length=1)
    tier: Literal[256, 480, 720] | None = None
    min_frames: int = Field(default=61, ge=1)
    max_frames: int = Field(default=189, ge=1)
    token_budget: int = Field(ge=1)
    lookahead: int = Field(default=64, ge=0)
    caption_dropout: float = Field(default=0.1, ge=0, le=1)
    conditioning: tuple[float, ...] = (0.7, 0.2, 0.1)
    max_bad_share: float = Field(default=0.02, ge=0, le=1)
    cache_gib: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _frames(self) -> "DataSettings":
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames = {self.min_frames} is above max_frames = {self.max_frames}")
        if not self.conditioning or min(self.conditioning) < 0 or sum(self.conditioning) <= 0:
            raise ValueError(f"conditioning = {list(self.conditioning)}: shares are needed, not all zero")
        return self


class ParallelSettings(Section):
    """Mesh axes; ``shard = -1`` takes what the others leave."""

    replicate: int = 1
    shard: int = -1


class Recipe(Section):
    """Everything `train` needs.

    Attributes:
        trained: all weights, or those of the generation tower and its heads (as published).
        start: weights to begin with.
    """

    run: str
    data: DataSettings
    model: ModelSettings = ModelSettings()
    text: TextSettings = TextSettings()
    tokenizer: VideoTokenizerSettings = VideoTokenizerSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    sampler: SamplerSettings = SamplerSettings()
    parallel: ParallelSettings = ParallelSettings()
    trained: Trained = "all"
    start: WarmStartSettings | None = None
    trainer: TrainerSettings

    @model_validator(mode="after")
    def _channels_agree(self) -> "Recipe":
        if self.tokenizer.kind == "linear" and self.tokenizer.channels != self.model.latent_channel:
            raise ValueError(
                f"model.latent_channel = {self.model.latent_channel} must equal tokenizer.channels = "
                f"{self.tokenizer.channels}"
            )
        return self

    def clip_folders(self, root: Path) -> list[Path]:
        """Where the clips lie."""
        return [root / "clips" / name for name in self.data.clips]

    def export_config(self, clip: ClipSettings) -> ExportConfig:
        """What an export says of itself; `clip`: what the model was trained on."""
        return ExportConfig(
            run=self.run,
            model=self.model,
            text=self.text,
            tokenizer=self.tokenizer,
            clip=clip,
            sampler=self.sampler,
        )

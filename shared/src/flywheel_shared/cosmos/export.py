"""What an export of a Cosmos stage says of itself, and the model, tokenizers and settings read back from it."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, ValidationError
from torch import nn

from flywheel_shared.cosmos.model import CosmosModel, ModelSettings
from flywheel_shared.cosmos.sampler import SamplerSettings
from flywheel_shared.cosmos.text import PromptTokenizer, TextSettings
from flywheel_shared.errors import UserError, one_line
from flywheel_shared.export_folder import read_json, read_weights
from flywheel_shared.recipe import Section
from flywheel_shared.video import LinearVideoTokenizer
from flywheel_shared.wan_video import WanVideoTokenizer
from flywheel_shared.warm_start import WarmStartSettings

FORMAT = "flywheel-cosmos/1"
LINEAR_FILE = "video_tokenizer.safetensors"

VideoTokenizer = LinearVideoTokenizer | WanVideoTokenizer


class VideoTokenizerSettings(Section):
    """Video to latents.

    Attributes:
        kind: "linear", fitted on the corpus, or "wan", the published VAE.
        path: of "wan": folder of the VAE's weights.
        patch, channels: of "linear": pixels of a latent's side, and its channels.
    """

    kind: Literal["linear", "wan"] = "linear"
    path: str = ""
    patch: int = Field(default=8, ge=1)
    channels: int = Field(default=16, ge=1)
    seed: int = 0


class ClipSettings(Section):
    """The clips that a model was trained on: what it makes best, and by default."""

    height: int = Field(ge=1)
    width: int = Field(ge=1)
    num_frames: int = Field(ge=1)
    fps: float = Field(gt=0)


class ExportConfig(Section):
    """`config.json` of an export; `policy` is the table of the stage that trained a policy."""

    format: Literal["flywheel-cosmos/1"] = "flywheel-cosmos/1"
    run: str
    model: ModelSettings
    text: TextSettings
    tokenizer: VideoTokenizerSettings
    clip: ClipSettings
    sampler: SamplerSettings
    policy: dict[str, Any] | None = None

    @classmethod
    def read(cls, export: Path) -> Self:
        """Read an export's `config.json`; raises `UserError` for another stage's, or an older one."""
        path = export / "config.json"
        values = read_json(path)
        if values.get("format") != FORMAT:
            raise UserError(f"{path}: format is {values.get('format')!r}, expected {FORMAT!r}")
        try:
            return cls.model_validate_json(json.dumps(values))
        except ValidationError as error:
            raise UserError(f"{path}: {one_line(str(error))[:300]}") from None


@dataclass(frozen=True)
class Export:
    """A model ready to sample from."""

    config: ExportConfig
    model: CosmosModel
    prompts: PromptTokenizer
    tokenizer: VideoTokenizer
    device: torch.device

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Self:
        """Read an export; in bfloat16 on a GPU, float32 on a CPU.

        Raises `UserError` where a file is missing or does not fit.
        """
        config = ExportConfig.read(folder)
        model = CosmosModel.on_meta(config.model)
        model.load_state_dict(read_weights(folder, set(model.state_dict())), assign=True)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        nn.Module.to(model, device=device, dtype=dtype)
        model.eval().requires_grad_(False)
        tokenizer = open_video_tokenizer(config.tokenizer, folder / LINEAR_FILE, device)
        return cls(config, model, PromptTokenizer(config.text, folder), tokenizer, device)


def open_video_tokenizer(
    settings: VideoTokenizerSettings, linear: Path, device: torch.device
) -> VideoTokenizer:
    """The tokenizer that settings ask for; `linear` is the file of a fitted one."""
    if settings.kind == "linear":
        return LinearVideoTokenizer.load(linear).to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return WanVideoTokenizer.load(Path(settings.path), dtype).to(device)


def tokenizer_of_the_start(start: WarmStartSettings | None, root: Path) -> LinearVideoTokenizer | None:
    """The video tokenizer beside the weights to begin with: they go on with the latents they were trained on."""
    if start is None or not (root / start.source / LINEAR_FILE).is_file():
        return None
    return LinearVideoTokenizer.load(root / start.source / LINEAR_FILE)


def keep_assets(
    run_folder: Path, config: ExportConfig, prompts: PromptTokenizer, files: dict[str, Path]
) -> Path:
    """Write what an export needs into `<run>/.assets`, whole; returns the folder.

    `files` are copied under their names. Raises `UserError` where checkpoints of another recipe lie there.
    """
    assets = run_folder / ".assets"
    text = json.dumps(config.model_dump(mode="json"), indent=2)
    if (assets / "config.json").is_file() and (assets / "config.json").read_text() != text:
        if any(run_folder.glob("iter_*")):
            raise UserError(
                f"{run_folder}: was started with another recipe: choose another `run`, or remove the folder"
            )
        shutil.rmtree(assets)
    if assets.is_dir():
        return assets
    scratch = run_folder / ".assets.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / "config.json").write_text(text)
    for name, source in files.items():
        shutil.copyfile(source, scratch / name)
    prompts.save(scratch)
    scratch.rename(assets)
    return assets

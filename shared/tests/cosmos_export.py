"""A tiny Cosmos export with random weights, as dcp-convert leaves one."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from flywheel_shared.cosmos.export import (
    LINEAR_FILE,
    ClipSettings,
    ExportConfig,
    VideoTokenizerSettings,
)
from flywheel_shared.cosmos.model import CosmosModel, ModelSettings, init_from_scratch
from flywheel_shared.cosmos.sampler import SamplerSettings
from flywheel_shared.cosmos.text import BYTES_VOCABULARY, TextSettings
from flywheel_shared.video import LinearVideoTokenizer

SETTINGS = ModelSettings(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=BYTES_VOCABULARY,
    rope_axes_dim=(2, 1, 1),
    latent_channel=6,
    action_dim=8,
    num_embodiment_domains=8,
)


def write_export(folder: Path, seed: int = 0) -> Path:
    """Write it; clips of 9 frames of 32 x 64 at 10 fps, latents of 8 x 8 pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    model = CosmosModel.from_settings(SETTINGS)
    init_from_scratch(model, seed)
    save_file({name: x.contiguous() for name, x in model.state_dict().items()}, folder / "model.safetensors")
    config = ExportConfig(
        run="tiny",
        model=SETTINGS,
        text=TextSettings(describe=False),
        tokenizer=VideoTokenizerSettings(channels=6),
        clip=ClipSettings(height=32, width=64, num_frames=9, fps=10.0),
        sampler=SamplerSettings(steps=3),
    )
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    clips = torch.randint(0, 256, (4, 3, 9, 32, 64), generator=torch.Generator().manual_seed(seed)).byte()
    LinearVideoTokenizer.fit(list(clips), channels=6).save(folder / LINEAR_FILE)
    return folder

"""Small clips of a square that moves over a still ground, and a small recipe."""

import json
from pathlib import Path
from typing import Any

import torch
from torchcodec.encoders import VideoEncoder

STAGE = Path(__file__).parents[1]
LAPTOP = STAGE / "recipes" / "laptop.toml"
SMALL = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=2",
    "model.head_dim=8",
    "model.rope_axes_dim=[2, 1, 1]",
    "model.latent_channel=6",
    "tokenizer.channels=6",
    "data.min_frames=9",
    "data.max_frames=9",
    "data.token_budget=200",
    "trainer.warmup_steps=0",
    "trainer.log_every=1",
    "trainer.learning_rate=3e-3",
]


def picture(frame: int, seed: int, height: int = 32, width: int = 64) -> torch.Tensor:
    """Uint8 `[3, H, W]`: the square is at another place in every frame and every clip."""
    image = torch.full((3, height, width), 60, dtype=torch.uint8)
    left = (4 * frame + 7 * seed) % (width - 8)
    image[0, 8:16, left : left + 8] = 220
    return image


def write_clips(
    folder: Path, count: int = 12, frames: int = 12, size: tuple[int, int] = (32, 64)
) -> list[dict]:
    """Write `count` clips at 10 fps; returns the rows."""
    (folder / "train").mkdir(parents=True, exist_ok=True)
    (folder / "videos").mkdir(exist_ok=True)
    rows = []
    for clip in range(count):
        video = torch.stack([picture(frame, clip, *size) for frame in range(frames)])
        path = folder / "videos" / f"{clip}.mp4"
        VideoEncoder(video, frame_rate=10).to_file(str(path), codec="libx264", crf=4, pixel_format="yuv444p")
        rows.append(row(clip, frames, size))
    write_rows(folder, rows)
    return rows


def row(clip: int, frames: int = 12, size: tuple[int, int] = (32, 64)) -> dict[str, Any]:
    return {
        "uuid": f"clip-{clip}",
        "vision_path": f"../videos/{clip}.mp4",
        "width": size[1],
        "height": size[0],
        "framerate": 10.0,
        "nb_frames": frames,
        "duration": frames / 10,
        "t2w_windows": [
            {"start_frame": 0, "end_frame": 8, "temporal_interval": 1, "caption": f"move the square {clip}"}
        ],
    }


def write_rows(folder: Path, rows: list[dict]) -> None:
    text = "".join(json.dumps(one) + "\n" for one in rows)
    (folder / "train" / "video_dataset_file.jsonl").write_text(text)

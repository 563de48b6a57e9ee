"""Small models, recipes and corpora for tests."""

import json
from pathlib import Path

import numpy as np

from dreamzero_sft.model import ModelSettings

LAPTOP = Path(__file__).parents[1] / "recipes" / "laptop.toml"
SMALL = [  # the laptop's recipe, smaller still
    "model.dim=32", "model.ffn_dim=64", "model.num_heads=2", "model.num_layers=2", "model.hidden_size=16",
    "views.height=32", "views.width=32", "trainer.log_every=1", "trainer.warmup_steps=2", "data.batch_size=8",
]  # fmt: skip


def model_settings(**changes) -> ModelSettings:
    fields = {
        "dim": 32, "ffn_dim": 64, "num_heads": 2, "num_layers": 2, "in_dim": 4, "out_dim": 4, "freq_dim": 16,
        "text_dim": 12, "clip_dim": 10, "action_dim": 7, "max_state_dim": 8, "hidden_size": 16,
        "num_frame_per_block": 2, "num_action_per_block": 4,
    }  # fmt: skip
    return ModelSettings(**(fields | changes))


def write_corpus(root: Path, episodes: int = 3, rows: int = 20, size: int = 32, fps: int = 10) -> Path:
    """A LeRobot v3 dataset of a square that moves as the actions say."""
    from lerobot.configs.video import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    view = {"dtype": "video", "shape": (size, size, 3), "names": ["height", "width", "channels"]}
    dataset = LeRobotDataset.create(
        repo_id="local/tiny", fps=fps, root=root, use_videos=True,
        rgb_encoder=RGBEncoderConfig(vcodec="h264", crf=10, preset="veryfast"),
        features={
            "observation.images.agentview": view,
            "observation.images.wrist": dict(view),
            "observation.state": {"dtype": "float32", "shape": (8,), "names": None},
            "action": {"dtype": "float32", "shape": (7,), "names": None},
        },
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for episode in range(episodes):
        for row in range(rows):
            picture = np.full((size, size, 3), 40, dtype=np.uint8)
            picture[row : row + 8, 4 * episode : 4 * episode + 8] = 220
            dataset.add_frame(
                {
                    "observation.images.agentview": picture,
                    "observation.images.wrist": picture[::-1].copy(),
                    "observation.state": rng.normal(size=8).astype(np.float32),
                    "action": rng.uniform(-1, 1, 7).astype(np.float32),
                    "task": "move the square",
                }
            )
        dataset.save_episode()
    dataset.finalize()
    return root


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]

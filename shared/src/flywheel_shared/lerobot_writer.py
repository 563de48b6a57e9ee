"""A LeRobot v3 dataset, written by the official library; whole or absent."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flywheel_shared.errors import UserError

CRF = 10  # H.264 quality: a policy reads positions finer than a pixel


class DatasetWriter:
    """Episodes one after another into a folder beside `output`, renamed when all are written.

    Use it in a `with` block: leaving it by an error leaves nothing behind, and what was there before untouched.
    """

    def __init__(
        self, output: Path, fps: float, features: Mapping[str, Mapping[str, Any]], robot: str, overwrite: bool
    ) -> None:
        """`features` as LeRobot's `create` takes them.

        Raises `UserError` where `output` exists and is not to be replaced, or holds no dataset, and where LeRobot
        has no such rate.
        """
        if output.exists() and not overwrite:
            raise UserError(f"{output}: exists already: pass --overwrite to write it again")
        if output.exists() and not (output / "meta" / "info.json").is_file():
            raise UserError(
                f"{output}: holds no dataset, so --overwrite does not replace it: give another one"
            )
        if fps != int(fps):
            raise UserError(f"{output}: LeRobot counts whole frames a second, found {fps}")
        import av.logging
        import datasets
        from lerobot.configs.video import RGBEncoderConfig
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        av.logging.set_libav_level(av.logging.ERROR)  # 20 lines a video otherwise, and a bar an episode
        av.logging.set_level(av.logging.ERROR)
        datasets.disable_progress_bars()
        self.output = output
        self.episodes = 0
        self._scratch = output.with_name(f".{output.name}.partial")
        self._about: list[dict[str, Any]] = []
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.parent.mkdir(parents=True, exist_ok=True)
        self._dataset = LeRobotDataset.create(
            repo_id=f"local/{output.name}",
            fps=int(fps),
            features={name: dict(feature) for name, feature in features.items()},
            root=self._scratch,
            robot_type=robot,
            rgb_encoder=RGBEncoderConfig(vcodec="h264", crf=CRF, preset="veryfast"),
            streaming_encoding=False,  # its queue drops frames when the machine is busy
        )

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def add(self, frames: Iterable[Mapping[str, Any]], task: str, about: Mapping[str, Any]) -> None:
        """One episode; `about` becomes a column each of `meta/episodes` (the same names for all episodes)."""
        for frame in frames:
            self._dataset.add_frame({**frame, "task": task})
        with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):  # noqa: PTH123
            self._dataset.save_episode()
        self._about.append(dict(about))
        self.episodes += 1

    def finish(self, documents: Mapping[str, Any]) -> None:
        """Close the dataset, write `documents` as `meta/<name>`, and put it in its place.

        Raises `UserError` where no episode was added.
        """
        self._dataset.finalize()
        if not self.episodes:
            raise UserError(f"{self.output}: no episode to write")
        self._describe()
        for name, document in documents.items():
            (self._scratch / "meta" / name).write_text(json.dumps(document, indent=2))
        if self.output.exists():
            shutil.rmtree(self.output)
        os.replace(self._scratch, self.output)  # noqa: PTH105 - the rename that makes it whole

    def _describe(self) -> None:
        """Add columns to the episodes' table; the library keeps those that it does not know."""
        import pandas as pd

        about = pd.DataFrame(self._about)
        for path in sorted((self._scratch / "meta" / "episodes").rglob("*.parquet")):
            table = pd.read_parquet(path)
            rows = about.iloc[table["episode_index"].to_numpy()]
            for name in about.columns:
                table[name] = rows[name].to_numpy()
            table.to_parquet(path, index=False)

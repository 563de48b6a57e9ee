"""Demonstrations to a LeRobot v3 dataset, through the official library; whole or absent."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from flywheel_shared.errors import UserError
from libero_eval.settings import RecordSection, SimulatorSection

if TYPE_CHECKING:
    from libero_eval.record import Demonstration

AGENT, WRIST = "observation.images.agentview", "observation.images.wrist"
STATE_NAMES = ["x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "finger_left", "finger_right"]
ACTION_NAMES = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
CRF = 10  # H.264 quality: a policy reads positions finer than a pixel


def write_dataset(
    demonstrations: Iterator["Demonstration"],
    attempts: int,
    simulator: SimulatorSection,
    record: RecordSection,
    output: Path,
    overwrite: bool,
) -> tuple[int, int]:
    """Write the successful demonstrations; how many were kept, and how many attempts failed.

    The dataset is made beside ``output`` and renamed. ``meta/recording.json`` says how it was made;
    ``meta/episodes`` has a column each for suite, task, initial state, seed and noise.

    Raises:
        UserError: if ``output`` exists and ``overwrite`` is False, or nothing was kept.
    """
    import av
    import av.logging
    import datasets
    from lerobot.configs.video import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    av.logging.set_level(av.logging.ERROR)
    datasets.disable_progress_bars()
    if output.exists() and not overwrite:
        raise UserError(f"{output}: exists already: pass --overwrite to record it again")
    if output.exists() and not (output / "meta" / "info.json").is_file():
        raise UserError(
            f"{output}: holds no recording, so --overwrite does not replace it: give another --output"
        )
    scratch = output.with_name(f".{output.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    av.logging.set_libav_level(av.logging.ERROR)  # 20 lines a video otherwise, and a bar an episode
    datasets.disable_progress_bars()
    dataset = LeRobotDataset.create(
        repo_id=f"local/{output.name}",
        fps=simulator.rate_hz,
        features=_features(simulator.size),
        root=scratch,
        robot_type="panda",
        rgb_encoder=RGBEncoderConfig(vcodec="h264", crf=CRF, preset="veryfast"),
        streaming_encoding=False,  # its queue drops frames when the machine is busy
    )
    kept: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for count, demonstration in enumerate(demonstrations, 1):
        job = demonstration.job
        about = {
            "suite": simulator.suite,
            "task_id": job.task,
            "init_state": job.init_state,
            "seed": job.seed,
        }
        if demonstration.success:
            _add(dataset, demonstration)
            kept.append(about | {"noise": record.noise, "spread_m": record.spread_m})
        else:
            failed.append(about)
        if count % 5 == 0 or count == attempts:
            rate = (time.monotonic() - started) / count
            print(
                f"{count}/{attempts} attempts, {len(kept)} kept, {len(failed)} failed, {rate:.1f} s each, "
                f"{rate * (attempts - count):.0f} s left",
                flush=True,
            )
    dataset.finalize()
    if not kept:
        shutil.rmtree(scratch)
        raise UserError(
            f"none of {attempts} attempts succeeded: the expert cannot do these tasks; see the README"
        )
    _describe_episodes(scratch, kept)
    recording = {
        "simulator": simulator.model_dump(mode="json"),
        "record": record.model_dump(mode="json"),
        "attempts": attempts,
        "kept": len(kept),
        "failed": failed,
    }
    (scratch / "meta" / "recording.json").write_text(json.dumps(recording, indent=2))
    if output.exists():
        shutil.rmtree(output)
    os.replace(scratch, output)  # noqa: PTH105 - the rename that makes it whole
    return len(kept), len(failed)


def _features(size: int) -> dict[str, dict[str, Any]]:
    view = {"dtype": "video", "shape": (size, size, 3), "names": ["height", "width", "channels"]}
    return {
        AGENT: dict(view),
        WRIST: dict(view),
        "observation.state": {"dtype": "float32", "shape": (8,), "names": STATE_NAMES},
        "action": {"dtype": "float32", "shape": (7,), "names": ACTION_NAMES},
    }


def _add(dataset: Any, demonstration: "Demonstration") -> None:
    for agent, wrist, state, action in zip(
        demonstration.agent, demonstration.wrist, demonstration.state, demonstration.action, strict=True
    ):
        dataset.add_frame(
            {
                AGENT: agent,
                WRIST: wrist,
                "observation.state": state,
                "action": action,
                "task": demonstration.instruction,
            }
        )
    with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):  # noqa: PTH123
        dataset.save_episode()


def _describe_episodes(root: Path, kept: list[dict[str, Any]]) -> None:
    """Add a column each to the episodes' table; the library keeps columns that it does not know."""
    about = pd.DataFrame(kept)
    for path in sorted((root / "meta" / "episodes").rglob("*.parquet")):
        table = pd.read_parquet(path)
        rows = about.iloc[table["episode_index"].to_numpy()]
        for name in about.columns:
            table[name] = rows[name].to_numpy()
        table.to_parquet(path, index=False)

"""Demonstrations to a LeRobot v3 dataset, through the official library; whole or absent."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flywheel_shared.errors import UserError
from flywheel_shared.lerobot_writer import DatasetWriter
from libero_eval.settings import RecordSection, SimulatorSection

if TYPE_CHECKING:
    from libero_eval.record import Demonstration

AGENT, WRIST = "observation.images.agentview", "observation.images.wrist"
STATE_NAMES = ["x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "finger_left", "finger_right"]
ACTION_NAMES = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]


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
    started = time.monotonic()
    kept: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    with DatasetWriter(output, simulator.rate_hz, _features(simulator.size), "panda", overwrite) as dataset:
        for count, demonstration in enumerate(demonstrations, 1):
            job = demonstration.job
            about = {
                "suite": simulator.suite,
                "task_id": job.task,
                "init_state": job.init_state,
                "seed": job.seed,
            }
            if demonstration.success:
                kept.append(about | {"noise": record.noise, "spread_m": record.spread_m})
                dataset.add(_frames(demonstration), demonstration.instruction, kept[-1])
            else:
                failed.append(about)
            if count % 5 == 0 or count == attempts:
                rate = (time.monotonic() - started) / count
                print(
                    f"{count}/{attempts} attempts, {len(kept)} kept, {len(failed)} failed, {rate:.1f} s each, "
                    f"{rate * (attempts - count):.0f} s left",
                    flush=True,
                )
        if not kept:
            raise UserError(
                f"none of {attempts} attempts succeeded: the expert cannot do these tasks; see the README"
            )
        recording = {
            "simulator": simulator.model_dump(mode="json"),
            "record": record.model_dump(mode="json"),
            "attempts": attempts,
            "kept": len(kept),
            "failed": failed,
        }
        dataset.finish({"recording.json": recording})
    return len(kept), len(failed)


def _features(size: int) -> dict[str, dict[str, Any]]:
    view = {"dtype": "video", "shape": (size, size, 3), "names": ["height", "width", "channels"]}
    return {
        AGENT: dict(view),
        WRIST: dict(view),
        "observation.state": {"dtype": "float32", "shape": (8,), "names": STATE_NAMES},
        "action": {"dtype": "float32", "shape": (7,), "names": ACTION_NAMES},
    }


def _frames(demonstration: "Demonstration") -> Iterator[dict[str, Any]]:
    for agent, wrist, state, action in zip(
        demonstration.agent, demonstration.wrist, demonstration.state, demonstration.action, strict=True
    ):
        yield {AGENT: agent, WRIST: wrist, "observation.state": state, "action": action}

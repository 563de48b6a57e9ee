"""Rows of `train/video_dataset_file.jsonl` to windows that can be trained on, every fault named."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flywheel_shared.cosmos.sequence import TEMPORAL
from flywheel_shared.errors import UserError, one_line
from vision_sft.recipe import DataSettings

ROWS = Path("train") / "video_dataset_file.jsonl"

# Width x height of each resolution tier (cosmos-framework's; portraits are the same turned).
_TIERS: dict[int, tuple[tuple[int, int], ...]] = {
    256: ((256, 256), (320, 256), (320, 192)),
    480: ((640, 640), (736, 544), (832, 480)),
    720: ((960, 960), (1104, 832), (1280, 720)),
}


@dataclass(frozen=True)
class Window:
    """One stretch of one clip with its caption.

    Attributes:
        video: the mp4.
        frames: numbers of the frames taken, 1 + 4k of them, in order.
        fps: of the frames taken.
        caption: prose, or a JSON caption serialised.
        is_json: which of the two; prose gets sentences on duration, rate and size.
        height, width: pixels of the sample.
    """

    uuid: str
    video: Path
    frames: range
    fps: float
    caption: str
    is_json: bool
    height: int
    width: int


class Faulty(Exception):
    """Why a window cannot be trained on."""


@dataclass(frozen=True)
class ClipWindows:
    """What was found: `windows` in the order of the rows, `faults` as lines that name file and reason."""

    windows: list[Window]
    faults: list[str]


def read_windows(folders: Sequence[Path], settings: DataSettings) -> ClipWindows:
    """Read the rows of all folders.

    Raises `UserError` where a file is missing or not JSON, where nothing can be trained on, and where the share
    of faulty windows is above `max_bad_share`.
    """
    windows: list[Window] = []
    faults: list[str] = []
    for folder in folders:
        for place, row in _rows(folder / ROWS):
            spans = row.get("t2w_windows")
            if not isinstance(spans, list) or not spans:
                faults.append(f"{place}: t2w_windows is missing or empty")
                continue
            for number, span in enumerate(spans):
                try:
                    windows.append(_window(folder, row, span, settings))
                except Faulty as fault:
                    faults.append(f"{place}: window {number}: {fault}")
    check_share(faults, len(windows) + len(faults), settings.max_bad_share)
    if not windows:
        raise UserError(f"{folders[0] / ROWS}: no window to train on")
    return ClipWindows(windows, faults)


def check_share(faults: Sequence[str], total: int, allowed: float) -> None:
    """Raise `UserError` when more than the allowed share is faulty."""
    if total and len(faults) / total > allowed:
        raise UserError(
            f"{len(faults)} of {total} windows cannot be trained on, more than data.max_bad_share = {allowed:g}; "
            f"the first: {faults[0]}"
        )


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; sdg ingest writes it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"expected an object, found {type(row).__name__}")
        except ValueError as error:
            raise UserError(f"{path}: line {number}: {one_line(str(error))}") from None
        yield f"{path}: line {number} (uuid {row.get('uuid')})", row


def _window(folder: Path, row: dict[str, Any], span: Any, settings: DataSettings) -> Window:
    first: Any
    last: Any
    step: Any
    if not isinstance(span, dict):
        raise Faulty("not an object")
    video = _video(folder, row.get("vision_path"))
    caption, is_json = _caption(span)
    first, last, step = (span.get(key) for key in ("start_frame", "end_frame", "temporal_interval"))
    step = 1 if step is None else step
    whole = isinstance(first, int) and isinstance(last, int) and isinstance(step, int)
    if not whole or first < 0 or step < 1 or last < first:
        raise Faulty(
            f"start_frame {first!r}, end_frame {last!r}, temporal_interval {step!r} are no stretch of frames"
        )
    held = row.get("nb_frames")
    if isinstance(held, int) and last >= held:
        raise Faulty(f"end_frame {last} lies outside of the clip's {held} frames ({video.name})")
    count = min(len(range(first, last + 1, step)), settings.max_frames)
    if count < settings.min_frames:
        raise Faulty(f"{count} frames, data.min_frames is {settings.min_frames} ({video.name})")
    count = 1 + (count - 1) // TEMPORAL * TEMPORAL
    rate, width, height = (row.get(key) for key in ("framerate", "width", "height"))
    if not isinstance(rate, int | float) or rate <= 0:
        raise Faulty(f"framerate is {rate!r}, expected a number above 0")
    if not isinstance(width, int) or not isinstance(height, int) or min(width, height) < 1:
        raise Faulty(f"width {width!r}, height {height!r}: expected whole numbers")
    if settings.tier is not None:
        width, height = size_in_tier(width, height, settings.tier)
    return Window(
        uuid=str(row.get("uuid", video.stem)),
        video=video,
        frames=range(first, first + count * step, step),
        fps=rate / step,
        caption=caption,
        is_json=is_json,
        height=height,
        width=width,
    )


def size_in_tier(width: int, height: int, tier: int) -> tuple[int, int]:
    """The tier's (width, height) whose aspect is closest."""
    sizes = {size for w, h in _TIERS[tier] for size in ((w, h), (h, w))}
    return min(sorted(sizes), key=lambda size: abs(size[0] / size[1] - width / height))


def _video(folder: Path, name: Any) -> Path:
    if not isinstance(name, str) or not name:
        raise Faulty(f"vision_path is {name!r}, expected a file's name")
    video = (folder / ROWS).parent / name
    if not video.resolve().is_relative_to(folder.resolve()):
        raise Faulty(f"vision_path {name!r} leads out of {folder}")
    if not video.is_file():
        raise Faulty(f"vision_path {name!r}: no such file")
    return video


def _caption(span: dict[str, Any]) -> tuple[str, bool]:
    structured = span.get("caption_json")
    if structured:
        return (structured if isinstance(structured, str) else json.dumps(structured)), True
    caption = span.get("caption")
    if not isinstance(caption, str) or not caption.strip():
        raise Faulty("caption_json and caption are empty")
    return caption.strip(), False

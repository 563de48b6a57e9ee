"""The rows of a LeRobot v3 folder, checked once, held as plain arrays. Nothing is ever fetched."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.dataset

from flywheel_shared.errors import UserError, one_line

if TYPE_CHECKING:
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata


@dataclass(frozen=True)
class Corpus:
    """Rows sorted by episode and frame: row `starts[e] + f` is frame `f` of episode `e`."""

    root: Path
    fps: float
    cameras: dict[str, str]  # colour cameras, each "video" or "image"
    video_files: dict[str, list[Path]]  # of a camera, the file of each episode
    video_start_s: dict[str, np.ndarray]  # of a camera, where each episode begins in its file, float64 [E]
    data_files: list[Path]
    starts: np.ndarray  # int64 [E + 1], the last one is the number of rows
    columns: dict[str, np.ndarray]  # float32 [N, D]
    tasks: list[str]
    task_of_row: np.ndarray  # int64 [N], into tasks

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Rows of each episode, int64 [E]."""
        return np.diff(self.starts)


def action_state_arrays(
    root: Path, *, state_key: str = "observation.state", action_key: str = "action"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give actions float32 `[N, Da]`, states float32 `[N, Ds]` and episode lengths int64 `[E]`, in row order.

    Reads no video. Raises `UserError` as `open_corpus` does.
    """
    corpus = open_corpus(root, [action_key, state_key])
    return corpus.columns[action_key], corpus.columns[state_key], corpus.lengths


def open_corpus(root: Path, keys: Sequence[str]) -> Corpus:
    """Read metadata and the vector columns `keys` of every row.

    Raises `UserError` where the folder is no LeRobot v3 dataset, holds no episode, lacks a key or a row, or
    contradicts itself.
    """
    metadata = _read_metadata(root)
    for key in keys:
        _check_vector(root, key, metadata.features)
    files = sorted((root / "data").glob("*/*.parquet"))
    table = _read_columns(root, files, ["episode_index", "frame_index", "task_index", *keys])
    episode, frame, task = (table[name].to_numpy() for name in ("episode_index", "frame_index", "task_index"))
    order = np.lexsort((frame, episode))
    starts = _check_episodes(root, metadata, episode[order], frame[order])
    tasks = _task_names(metadata)
    if task.min() < 0 or task.max() >= len(tasks):
        raise UserError(f"{root}: data names task {task.max()}, meta/tasks.parquet has {len(tasks)}")
    cameras = {
        key: metadata.features[key]["dtype"] for key in metadata.camera_keys if key not in metadata.depth_keys
    }
    videos = [key for key, kind in cameras.items() if kind == "video"]
    # Plain values only: the library's object prints an error when it is still alive as the interpreter ends.
    return Corpus(
        root=root,
        fps=float(metadata.fps),
        cameras=cameras,
        video_files={key: _video_files(root, metadata, key) for key in videos},
        video_start_s={
            key: np.asarray(metadata.episodes[f"videos/{key}/from_timestamp"], float) for key in videos
        },
        data_files=files,
        starts=starts,
        columns={key: _vectors(root, key, table[key])[order] for key in keys},
        tasks=tasks,
        task_of_row=task[order],
    )


def _read_metadata(root: Path) -> "LeRobotDatasetMetadata":
    # The library would fetch a dataset of this name from the hub where one of these is missing.
    needed = ["meta/info.json", "meta/tasks.parquet", "meta/episodes/*/*.parquet", "data/*/*.parquet"]
    missing = [pattern for pattern in needed if not any(root.glob(pattern))]
    if missing:
        found = ", ".join(sorted(path.name for path in root.iterdir())) if root.is_dir() else "no such folder"
        raise UserError(f"{root}: no LeRobot v3 dataset: {', '.join(missing)} missing (found: {found})")
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata

    try:
        metadata = LeRobotDatasetMetadata(f"local/{root.name}", root=root)
    except Exception as error:  # each of its readers has errors of its own
        raise UserError(f"{root}: metadata cannot be read: {one_line(str(error))}") from None
    if not metadata.episodes:
        raise UserError(f"{root}: the dataset holds no episodes")
    return metadata


def _check_vector(root: Path, key: str, features: dict[str, dict]) -> None:
    vectors = {name: tuple(spec["shape"]) for name, spec in features.items() if _is_vector(spec)}
    if key not in vectors:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in vectors.items())
        raise UserError(f"{root}: no vector of numbers named {key!r}; there are {shapes}")


def _is_vector(spec: dict) -> bool:
    return spec["dtype"].startswith(("float", "int", "uint", "bool")) and len(spec["shape"]) == 1


def _read_columns(root: Path, files: list[Path], names: list[str]) -> pa.Table:
    try:
        return pyarrow.dataset.dataset(files, format="parquet").to_table(columns=names)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{root}: rows cannot be read: {one_line(str(error))[:300]}") from None


def _vectors(root: Path, key: str, column: pa.ChunkedArray) -> np.ndarray:
    array = column.combine_chunks()
    size = 1
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        values = array.flatten()
        size = len(values) // max(len(array), 1)
        if array.null_count or values.null_count or len(values) != len(array) * size:
            raise UserError(f"{root}: {key}: rows are of different lengths or empty")
        array = values
    # A feature of shape [1] is stored as a plain number.
    return array.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, size)


def _check_episodes(
    root: Path, metadata: "LeRobotDatasetMetadata", episode: np.ndarray, frame: np.ndarray
) -> np.ndarray:
    """Give the first row of each episode, having seen that data and metadata tell of the same rows."""
    lengths = np.asarray(metadata.episodes["length"], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    if not np.array_equal(metadata.episodes["episode_index"], np.arange(len(lengths))):
        raise UserError(f"{root}: meta/episodes does not list episodes 0 to {len(lengths) - 1} in order")
    if not np.array_equal(episode, np.repeat(np.arange(len(lengths)), lengths)):
        counted = (
            np.bincount(episode, minlength=len(lengths)) if len(episode) else np.zeros(len(lengths), int)
        )
        wrong = [e for e, n in enumerate(counted) if e >= len(lengths) or n != lengths[e]]
        listed = lengths[wrong[0]] if wrong[0] < len(lengths) else "no such episode"
        raise UserError(
            f"{root}: episode {wrong[0]}: data has {counted[wrong[0]]} rows, meta/episodes lists {listed}"
        )
    expected = np.arange(len(frame)) - np.repeat(starts[:-1], lengths)
    if not np.array_equal(frame, expected):
        row = int(np.flatnonzero(frame != expected)[0])
        raise UserError(
            f"{root}: episode {episode[row]}: expected frame_index {expected[row]}, found {frame[row]}"
        )
    return starts


def _video_files(root: Path, metadata: "LeRobotDatasetMetadata", camera: str) -> list[Path]:
    chunks, files = (metadata.episodes[f"videos/{camera}/{name}"] for name in ("chunk_index", "file_index"))
    template = metadata.video_path or ""
    paths = []
    for chunk, file in zip(chunks, files, strict=True):
        relative = Path(template.format(video_key=camera, chunk_index=chunk, file_index=file))
        if relative.is_absolute() or ".." in relative.parts:
            raise UserError(f"{root}: meta/info.json: video_path leads out of the dataset: {relative}")
        paths.append(root / relative)
    return paths


def _task_names(metadata: "LeRobotDatasetMetadata") -> list[str]:
    table = metadata.tasks.sort_values("task_index")
    return [str(name) for name in table.index]

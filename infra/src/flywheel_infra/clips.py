"""The clips of a run that a model generated: beside what really followed, how close, how many were kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flywheel_infra.ledger import Ledger
from flywheel_infra.run_folder import read_json, read_lines

ROWS = Path("train") / "video_dataset_file.jsonl"


@dataclass(frozen=True)
class Clip:
    """One generated mp4 and the real one whose beginning it continues, where that is still there."""

    uuid: str
    generated: Path
    real: Path | None
    caption: str


@dataclass(frozen=True)
class ClipFolder:
    """One folder under clips/ that a model, or a judge of its clips, has written."""

    path: Path
    turn: int
    clips: list[Clip]
    quality: dict[str, float] | None  # generation_quality.json
    curation: dict[str, Any] | None  # curation.json: {"kept": count, "dropped": {reason: count}}


def clip_folders(root: Path, ledger: Ledger) -> list[ClipFolder]:
    """Those of the turns that the run was asked for, by turn and name; folders of real clips are left out.

    A generated row of `train/video_dataset_file.jsonl` has a provenance {"kind": "generated", "source": ...}.
    The source is the uuid of a real clip, or the path of its mp4 from the row's file, its clip folder or the
    root. A path that leads out of the root counts as absent.
    """
    rows = {path: read_lines(path / ROWS) for path in sorted(root.glob("clips/*")) if path.is_dir()}
    real = {
        str(row.get("uuid")): video
        for path, these in rows.items()
        for row in these
        if not _is_generated(row) and (video := _mp4(root, [(path / ROWS).parent], row.get("vision_path")))
    }
    found = []
    for path, these in rows.items():
        folder = ClipFolder(
            path,
            ledger.place(path.name)[1],
            list(_clips(root, path, these, real)),
            _json_of(path / "generation_quality.json"),
            _json_of(path / "curation.json"),
        )
        if folder.turn <= ledger.turns and (folder.clips or folder.quality or folder.curation):
            found.append(folder)
    return sorted(found, key=lambda folder: (folder.turn, folder.path.name))


def _clips(root: Path, folder: Path, rows: Sequence[dict[str, Any]], real: dict[str, Path]) -> Iterator[Clip]:
    beside = (folder / ROWS).parent
    for row in rows:
        generated = _mp4(root, [beside], row.get("vision_path"))
        if not _is_generated(row) or generated is None:
            continue
        source = row["provenance"].get("source")
        followed = real.get(str(source)) or _mp4(root, [beside, folder, root], source)
        caption = next(
            (window["caption"] for window in row.get("t2w_windows", []) if "caption" in window), ""
        )
        yield Clip(str(row.get("uuid", generated.stem)), generated, followed, caption)


def _is_generated(row: dict[str, Any]) -> bool:
    provenance = row.get("provenance")
    return isinstance(provenance, dict) and provenance.get("kind") == "generated"


def _mp4(root: Path, bases: Sequence[Path], name: Any) -> Path | None:
    """The mp4 of that name under one of `bases`, None where there is none inside the root."""
    if not isinstance(name, str) or not name.endswith(".mp4"):
        return None
    paths = [(base / name).resolve() for base in bases]
    return next((path for path in paths if path.is_relative_to(root.resolve()) and path.is_file()), None)


def _json_of(path: Path) -> Any:
    return read_json(path) if path.is_file() else None

"""Rollouts for the eye: mp4s that browsers play, and a contact sheet of all episodes."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

from libero_eval.results import Episode

VIEW_PX = 256  # height of a view in a video
_THUMBNAIL_PX = 72
_THUMBNAILS = 8
_GAP_PX = 4
_BORDER_PX = 3
_LABEL_PX = 150
_COLOURS = {"success": (34, 160, 74), "failure": (208, 50, 47)}
_NOT_EVALUATED = (150, 150, 150)


def side_by_side(views: tuple[np.ndarray, np.ndarray], height: int) -> Image.Image:
    """Both views, uint8 [H, W, 3] each, next to each other and `height` pixels high."""
    scaled = [
        Image.fromarray(view).resize(
            (height * view.shape[1] // view.shape[0], height), Image.Resampling.BICUBIC
        )
        for view in views
    ]
    joined = Image.new("RGB", (sum(image.width for image in scaled), height))
    joined.paste(scaled[0], (0, 0))
    joined.paste(scaled[1], (scaled[0].width, 0))
    return joined


def write_video(path: Path, frames: Sequence[tuple[np.ndarray, np.ndarray]], fps: Fraction) -> None:
    """Encode pairs of views, uint8 [H, W, 3] each, as H.264 in yuv420p, its index in front (faststart)."""
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "23", "preset": "veryfast"})
        stream.pix_fmt = "yuv420p"
        for number, views in enumerate(frames):
            picture = side_by_side(views, VIEW_PX)
            if number == 0:
                stream.width, stream.height = picture.size
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode(None))


def thumbnails(frames: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Up to 8 frames of an episode, first and last included, evenly spread: uint8 [72, 144, 3] each."""
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(_THUMBNAILS, len(frames))).round().astype(int))
    return [np.asarray(side_by_side(frames[index], _THUMBNAIL_PX)) for index in chosen]


def write_contact_sheet(path: Path, rows: Sequence[tuple[Episode, list[np.ndarray]]]) -> None:
    """A row an episode: what it was, its thumbnails, a border green for success and red for failure."""
    cell = (2 * _THUMBNAIL_PX + _GAP_PX, _THUMBNAIL_PX)
    row_px = cell[1] + 2 * _BORDER_PX
    sheet = Image.new(
        "RGB", (_LABEL_PX + _THUMBNAILS * cell[0] + 2 * _BORDER_PX, row_px * len(rows)), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for number, (episode, pictures) in enumerate(rows):
        top = number * row_px
        colour = _COLOURS.get(episode.outcome, _NOT_EVALUATED)
        job = episode.job
        label = f"task {job.task_id}, state {job.init_state}"
        label += f" ({job.repeat + 1})" if job.repeat else ""
        draw.text((6, top + 14), f"{label}\n{episode.outcome}\n{episode.steps} steps", "black")
        draw.rectangle(
            (_LABEL_PX, top, sheet.width - 1, top + row_px - 1),
            outline=colour,
            width=_BORDER_PX,
            fill="#eeeeee",
        )
        for column, picture in enumerate(pictures):
            left = _LABEL_PX + _BORDER_PX + column * cell[0]
            sheet.paste(Image.fromarray(picture), (left, top + _BORDER_PX))
    sheet.quantize(256).save(path, optimize=True)  # a third of the bytes of full colour

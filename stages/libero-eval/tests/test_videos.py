"""mp4s and the contact sheet, read back."""

from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from libero_eval.results import Episode, Job
from libero_eval.videos import thumbnails, write_contact_sheet, write_video


def frames(count):
    """The left view grows brighter, the right one darker; green stays."""
    pairs = []
    for number in range(count):
        left, right = np.full((128, 128, 3), 20 * number, np.uint8), np.full((128, 128, 3), 200, np.uint8)
        right[..., 0] = 200 - 20 * number
        pairs.append((left, right))
    return pairs


@pytest.mark.parametrize("fps", [Fraction(10, 4), Fraction(10), Fraction(20, 3)])
def test_a_video_has_both_views_at_the_true_rate(tmp_path, fps):
    write_video(tmp_path / "a.mp4", frames(8), fps)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height) == (512, 256)
        decoded = list(container.decode(stream))
        shown_s = [float(frame.pts * stream.time_base) for frame in decoded]
    assert len(decoded) == 8
    # The container counts time in whole ticks, finer than a millisecond.
    assert shown_s == pytest.approx([number / float(fps) for number in range(8)], abs=1e-3)
    last = decoded[-1].to_ndarray(format="rgb24").astype(int)
    # Lossy, and the colour space keeps fewer levels: within 8 of 255.
    assert abs(last[:, :240].mean() - 140) < 8
    assert abs(last[:, 270:, 1].mean() - 200) < 8


def test_the_index_of_a_video_comes_before_its_pictures(tmp_path):
    write_video(tmp_path / "a.mp4", frames(4), Fraction(10))
    content = (tmp_path / "a.mp4").read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")


def test_thumbnails_keep_the_first_and_the_last_frame():
    pictures = thumbnails(frames(11))
    assert len(pictures) == 8
    assert pictures[0][:, :70].max() == 0
    assert pictures[-1][:, :70].min() == 200
    assert len(thumbnails(frames(1))) == 1


def test_the_contact_sheet_frames_rows_by_outcome(tmp_path):
    jobs = [Job(index, 0, 36 + index, 0, 0) for index in range(3)]
    rows = [
        (Episode(jobs[0], "success"), thumbnails(frames(9))),
        (Episode(jobs[1], "failure"), thumbnails(frames(9))),
        (Episode(jobs[2], "policy_unavailable"), []),
    ]
    write_contact_sheet(tmp_path / "sheet.png", rows)
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB")).astype(int)
    height = sheet.shape[0] // 3
    red, green = sheet[:, -1, 0], sheet[:, -1, 1]
    assert (green[:height] > red[:height] + 50).all()
    assert (red[height : 2 * height] > green[height : 2 * height] + 50).all()
    assert (abs(red[2 * height :] - green[2 * height :]) < 8).all()

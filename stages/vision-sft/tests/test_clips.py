"""Rows to windows: what cannot be trained on is named, counted and skipped up to a share."""

import json

import pytest
from vision_tiny import row, write_clips, write_rows

from flywheel_shared.errors import UserError
from vision_sft.clips import Faulty, read_windows, size_in_tier
from vision_sft.frames import WindowFrames, decode
from vision_sft.recipe import DataSettings

SETTINGS = DataSettings(clips=("libero",), min_frames=9, max_frames=9, token_budget=200, max_bad_share=0.9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("clips")
    write_clips(made, count=3)
    (made / "videos" / "broken.mp4").write_bytes(b"no video")
    return made


def span(**changes):
    plain = {"start_frame": 0, "end_frame": 8, "temporal_interval": 1, "caption": "go"}
    return {"t2w_windows": [plain | changes]}


def test_a_json_caption_goes_before_prose(folder):
    structured = {"actions": [{"description": "move"}]}
    rows = [row(0) | span(caption_json=structured), row(1) | span(caption_json=None)]
    write_rows(folder, rows)
    first, second = read_windows([folder], SETTINGS).windows
    assert (json.loads(first.caption), first.is_json) == (structured, True)
    assert (second.caption, second.is_json) == ("go", False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vision_path": "../videos/nowhere.mp4"}, "no such file"),
        ({"vision_path": "../../secret.mp4"}, "leads out of"),
        (span(caption=" "), "caption_json and caption are empty"),
        (span(end_frame=12), "end_frame 12 lies outside of the clip's 12 frames"),
        (span(start_frame=5, end_frame=2), "no stretch of frames"),
        (span(end_frame=5), "6 frames, data.min_frames is 9"),
        ({"t2w_windows": []}, "t2w_windows is missing or empty"),
        ({"framerate": 0}, "framerate is 0"),
    ],
)
def test_a_faulty_window_is_named_and_skipped(folder, changes, said):
    write_rows(folder, [row(0), row(1) | changes])
    found = read_windows([folder], SETTINGS)
    assert [window.uuid for window in found.windows] == ["clip-0"]
    assert len(found.faults) == 1
    assert "line 2 (uuid clip-1)" in found.faults[0]
    assert said in found.faults[0]
    strict = SETTINGS.model_copy(update={"max_bad_share": 0.4})
    with pytest.raises(UserError, match=r"1 of 2 windows cannot be trained on.*max_bad_share = 0\.4"):
        read_windows([folder], strict)


def test_windows_are_cut_to_whole_latents_and_keep_their_rate(folder):
    write_rows(folder, [row(0) | span(start_frame=1, end_frame=11, temporal_interval=2)])
    settings = SETTINGS.model_copy(update={"min_frames": 5})
    (window,) = read_windows([folder], settings).windows
    assert list(window.frames) == [1, 3, 5, 7, 9]
    assert window.fps == 5.0
    whole = decode(read_windows([folder], settings).windows[0])
    write_rows(folder, [row(0)])
    plain = decode(read_windows([folder], SETTINGS).windows[0])
    assert (whole[1] == plain[3]).all()


def test_a_broken_file_and_one_that_is_too_short_are_told(folder):
    write_rows(folder, [row(0) | {"vision_path": "../videos/broken.mp4"}])
    with pytest.raises(Faulty, match=r"broken.mp4: cannot be decoded"):
        decode(read_windows([folder], SETTINGS).windows[0])
    write_rows(folder, [row(0) | {"nb_frames": 40} | span(start_frame=10, end_frame=18)])
    with pytest.raises(Faulty, match="frame 18 asked for, the file has 12"):
        decode(read_windows([folder], SETTINGS).windows[0])


def test_what_is_kept_stays_within_the_cache(folder):
    write_rows(folder, [row(0), row(1), row(2)])
    windows = read_windows([folder], SETTINGS).windows
    one = 9 * 3 * 32 * 64
    frames = WindowFrames(2.5 * one / 2**30)
    first = frames.get(0, windows[0])
    frames.get(1, windows[1])
    assert frames.get(0, windows[0]) is first
    frames.get(2, windows[2])  # 1 goes: it was used least recently
    assert frames.get(0, windows[0]) is first
    assert sorted(frames._kept) == [0, 2]


def test_tiers_are_chosen_by_aspect():
    assert size_in_tier(1920, 1080, 720) == (1280, 720)
    assert size_in_tier(1080, 1920, 480) == (480, 832)
    assert size_in_tier(640, 480, 256) == (320, 256)
    assert size_in_tier(100, 100, 256) == (256, 256)


def test_a_missing_folder_and_a_broken_line_are_one_line(tmp_path):
    with pytest.raises(UserError, match="no such file; sdg ingest writes it"):
        read_windows([tmp_path], SETTINGS)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "video_dataset_file.jsonl").write_text('{"uuid": 1}\n[]\n')
    with pytest.raises(UserError, match="line 2: expected an object, found list"):
        read_windows([tmp_path], SETTINGS)

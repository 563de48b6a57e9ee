import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from torch import Tensor
from torch.utils.data import DataLoader

from flywheel_shared.errors import UserError
from flywheel_shared.lerobot_windows import EpisodeWindows, ShuffledBatches, action_state_arrays

FRONT, WRIST = "observation.images.front", "observation.images.wrist"
FPS = 7  # 1 / 7 s has no exact float: times of frames are rounded
LENGTHS = [11, 5, 8, 1]
TASKS = ["lift the cup", "put it down", "lift the cup", "wait"]


def write_corpus(root: Path, lengths: list[int] = LENGTHS, use_videos: bool = True) -> Path:
    """Episodes in which pixels, states and actions all tell episode and frame."""
    images = {"dtype": "video" if use_videos else "image", "names": ["height", "width", "channel"]}
    features = {
        FRONT: {**images, "shape": (64, 96, 3)},
        WRIST: {**images, "shape": (64, 64, 3)},
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        "gripper": {"dtype": "float32", "shape": (1,), "names": None},
    }
    dataset = LeRobotDataset.create("test/corpus", FPS, features, root=root, use_videos=use_videos)
    for episode, length in enumerate(lengths):
        for frame in range(length):
            dataset.add_frame(
                {
                    FRONT: np.full((64, 96, 3), level(episode, frame), np.uint8),
                    WRIST: np.full((64, 64, 3), 255 - level(episode, frame), np.uint8),
                    "observation.state": np.array([episode, frame, 0.5], np.float32),
                    "action": np.array([frame / 10, -episode], np.float32),
                    "gripper": np.array([frame], np.float32),
                    "task": TASKS[episode % len(TASKS)],
                }
            )
        dataset.save_episode()
    dataset.finalize()
    return root


def level(episode: int, frame: int) -> int:
    """Grey of a frame: frames that follow each other differ by 18, far more than the codec's error of 3."""
    return (40 * episode + 18 * frame) % 235 + 10


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("lerobot") / "corpus")


@pytest.fixture
def own_corpus(corpus, tmp_path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(corpus, tmp_path / "own"))


def open_windows(root: Path, **changes) -> EpisodeWindows:
    options = {
        "cameras": [FRONT, WRIST],
        "frame_offsets": [-2, 0, 1, 3],
        "state_offsets": [-1, 0],
        "action_offsets": [0, 1, 2, 3, 4],
    }
    return EpisodeWindows(root, **{**options, **changes})


def test_windows_equal_those_of_the_official_dataset(corpus):
    """Frames to the bit, as both decode the same stream; states and actions to the bit."""
    windows = open_windows(corpus)
    seconds = {
        FRONT: [-2 / FPS, 0, 1 / FPS, 3 / FPS],
        WRIST: [-2 / FPS, 0, 1 / FPS, 3 / FPS],
        "observation.state": [-1 / FPS, 0],
        "action": [step / FPS for step in range(5)],
    }
    official = LeRobotDataset("test/corpus", root=corpus, delta_timestamps=seconds, return_uint8=True)
    assert len(windows) == len(official) == sum(LENGTHS)
    for index in range(len(windows)):
        ours, theirs = windows.window(index), official[index]
        for camera in (FRONT, WRIST):
            assert ours["frames"][camera].dtype == torch.uint8
            assert torch.equal(ours["frames"][camera], theirs[camera])
        assert torch.equal(ours["state"], theirs["observation.state"])
        assert torch.equal(ours["actions"], theirs["action"])
        assert torch.equal(ours["action_valid"], ~theirs["action_is_pad"])
        assert torch.equal(ours["state_valid"], ~theirs["observation.state_is_pad"])
        assert torch.equal(ours["frame_valid"], ~theirs[f"{FRONT}_is_pad"])
        assert ours["task"] == theirs["task"]
        assert ours["episode_index"] == theirs["episode_index"]
        assert ours["frame_index"] == theirs["frame_index"]


def check_pixels(windows: EpisodeWindows) -> None:
    """Every frame shows the grey that its episode and number ask for."""
    for episode, length in enumerate(LENGTHS):
        frames = windows.episode_frames(episode)
        wanted = torch.tensor([level(episode, frame) for frame in range(length)], dtype=torch.float32)
        for camera, greys in ((FRONT, wanted), (WRIST, 255 - wanted)):
            seen = frames[camera].float().mean((1, 2, 3))
            assert (seen - greys).abs().max() < 5  # the codec's error is about 3


def edit(path: Path, change) -> None:
    table = pq.read_table(path)
    pq.write_table(change(table), path)


def set_column(table: pa.Table, name: str, values) -> pa.Table:
    return table.set_column(
        table.schema.get_field_index(name), name, pa.array(values, table.schema.field(name).type)
    )


def test_frames_are_where_their_pixels_say(corpus):
    check_pixels(open_windows(corpus))


def test_jitter_in_the_timestamps_neither_fails_nor_shifts_frames(own_corpus):
    rng = np.random.default_rng(0)

    def jitter_rows(table):
        times = table["timestamp"].to_numpy()
        return set_column(table, "timestamp", times + rng.uniform(-0.9, 0.9, len(times)) / FPS)

    def jitter_episodes(table):
        for camera in (FRONT, WRIST):
            name = f"videos/{camera}/from_timestamp"
            times = table[name].to_numpy()
            table = set_column(table, name, times + rng.uniform(-0.4, 0.4, len(times)))  # up to 2.8 frames
        return table

    edit(next(own_corpus.glob("data/*/*.parquet")), jitter_rows)
    # Order is all that is taken from the times of episodes: the last, 1 frame long, must stay the last.
    edit(next(own_corpus.glob("meta/episodes/*/*.parquet")), jitter_episodes)
    check_pixels(open_windows(own_corpus))


def test_video_with_frames_of_episodes_that_are_gone_is_read_by_its_clock(own_corpus):
    """As after a dataset was split without cutting its videos."""
    edit(
        next(own_corpus.glob("data/*/*.parquet")),
        lambda table: table.filter(pa.compute.field("episode_index") > 0),
    )
    edit(
        next(own_corpus.glob("data/*/*.parquet")),
        lambda table: set_column(table, "episode_index", table["episode_index"].to_numpy() - 1),
    )
    edit(
        next(own_corpus.glob("meta/episodes/*/*.parquet")),
        lambda table: set_column(
            table.slice(1), "episode_index", table.slice(1)["episode_index"].to_numpy() - 1
        ),
    )
    info = json.loads((own_corpus / "meta/info.json").read_text())
    info.update(total_episodes=3, total_frames=14)
    (own_corpus / "meta/info.json").write_text(json.dumps(info))
    windows = open_windows(own_corpus)
    assert windows.episode_lengths.tolist() == LENGTHS[1:]
    for episode in range(3):
        seen = windows.episode_frames(episode)[FRONT].float().mean((1, 2, 3))
        wanted = torch.tensor([level(episode + 1, frame) for frame in range(LENGTHS[episode + 1])])
        assert (seen - wanted).abs().max() < 5


def test_cameras_stored_as_images_are_read_too(tmp_path):
    windows = open_windows(write_corpus(tmp_path / "images", use_videos=False))
    for episode, length in enumerate(LENGTHS):
        frames = windows.episode_frames(episode)[FRONT]
        assert frames.shape == (length, 3, 64, 96)
        assert frames[:, 0, 0, 0].tolist() == [level(episode, frame) for frame in range(length)]  # no loss


def test_batch_is_the_stack_of_its_windows(corpus):
    windows = open_windows(corpus)
    indices = [0, 24, 10, 11, 3, 3]
    batch = windows.batch(indices)
    for place, index in enumerate(indices):
        window = windows.window(index)
        for camera in (FRONT, WRIST):
            assert torch.equal(batch["frames"][camera][place], window["frames"][camera])
        for name in ("state", "state_valid", "actions", "action_valid", "frame_valid", "frame_index"):
            assert torch.equal(batch[name][place], window[name])
        assert batch["task"][place] == window["task"]


def test_batch_is_a_copy(corpus):
    windows = open_windows(corpus)
    before = windows.batch([4])
    batch = windows.batch([4])
    batch["frames"][FRONT].zero_()
    batch["state"].zero_()
    after = windows.batch([4])
    assert torch.equal(after["frames"][FRONT], before["frames"][FRONT])
    assert torch.equal(after["state"], before["state"])


def test_transform_is_applied_once_an_episode_before_frames_are_kept(corpus):
    seen: list[int] = []

    def halve(frames: Tensor) -> Tensor:
        seen.append(len(frames))
        return frames[:, :, ::2, ::2]

    windows = open_windows(corpus, frame_transform=halve, cameras=[FRONT])
    for _ in range(3):
        assert windows.batch([0, 11])["frames"][FRONT].shape == (2, 4, 3, 32, 48)
    assert seen == LENGTHS[:2]


def test_cache_stays_within_its_bound_and_gives_the_same_frames(corpus):
    frame_bytes = 3 * 64 * (96 + 64)
    decoded: list[int] = []

    def count(frames: Tensor) -> Tensor:
        decoded.append(len(frames))
        return frames

    small = open_windows(corpus, cache_gib=13 * frame_bytes / 2**30, frame_transform=count)
    large = open_windows(corpus)
    assert small.episodes_in_cache() == 2  # 13 frames, 6.25 an episode
    for index in [0, 12, 0, 24, 12, 17]:
        assert torch.equal(small.window(index)["frames"][FRONT], large.window(index)["frames"][FRONT])
        kept = small._frames
        assert kept._bytes == sum(t.nbytes for e in kept._episodes.values() for t in e.values())
        assert kept._bytes <= 13 * frame_bytes or len(kept._episodes) == 1
    # 0, 1, 0 again, 3 and 1 fit beside nothing, 2 beside 1: two cameras each.
    assert decoded == [11, 11, 5, 5, 11, 11, 1, 1, 5, 5, 8, 8]


def test_forked_loader_worker_decodes_after_its_parent_did(corpus):
    windows = open_windows(corpus)
    windows.window(0)
    frames = [0, 12, 24]
    loader = DataLoader(
        frames, batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60,
        collate_fn=lambda index: windows.window(index)["frames"][FRONT],
    )  # fmt: skip
    for index, seen in zip(frames, loader, strict=True):
        assert torch.equal(seen, windows.window(index)["frames"][FRONT])


def test_statistics_arrays_hold_every_row_in_order(corpus):
    actions, states, lengths = action_state_arrays(corpus)
    assert lengths.tolist() == LENGTHS
    assert actions.dtype == states.dtype == np.float32
    wanted = [(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)]
    np.testing.assert_array_equal(states, [(episode, frame, 0.5) for episode, frame in wanted])
    np.testing.assert_array_equal(actions, np.float32([(frame / 10, -episode) for episode, frame in wanted]))
    assert action_state_arrays(corpus, action_key="gripper")[0].shape == (25, 1)


def test_rows_out_of_order_are_sorted(own_corpus):
    edit(
        next(own_corpus.glob("data/*/*.parquet")),
        lambda table: table.take(np.random.default_rng(0).permutation(25)),
    )
    assert action_state_arrays(own_corpus)[1][:, 1].tolist() == [
        f for length in LENGTHS for f in range(length)
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"cameras": ["observation.images.top"]},
            ["no colour camera 'observation.images.top'", FRONT, WRIST],
        ),
        (
            {"state_key": "observation.pose"},
            ["no vector", "'observation.pose'", "observation.state [3]", "action [2]"],
        ),
        ({"action_key": FRONT}, ["no vector", "action [2]"]),
    ],
)
def test_wrong_names_are_answered_with_those_that_are_there(corpus, changes, words):
    with pytest.raises(UserError) as caught:
        open_windows(corpus, **changes)
    for word in [str(corpus), *words]:
        assert word in str(caught.value)


def test_folders_that_are_no_dataset_are_named_and_nothing_is_fetched(tmp_path, own_corpus, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("fetched"))
    with pytest.raises(UserError, match=r"no LeRobot v3 dataset.*no such folder"):
        open_windows(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.txt").touch()
    with pytest.raises(UserError, match=r"meta/info\.json.*x\.txt"):
        open_windows(tmp_path / "empty")
    assert not (tmp_path / "nowhere").exists()
    (own_corpus / "meta" / "tasks.parquet").unlink()
    with pytest.raises(UserError, match=r"meta/tasks\.parquet missing"):
        open_windows(own_corpus)


def test_dataset_of_another_version_is_a_user_error(own_corpus):
    info = json.loads((own_corpus / "meta/info.json").read_text())
    (own_corpus / "meta/info.json").write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    with pytest.raises(UserError, match="metadata cannot be read"):
        open_windows(own_corpus)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.slice(0, 20), "episode 2: data has 4 rows, meta/episodes lists 8"),
        (lambda t: pa.concat_tables([t, t.slice(24)]), "episode 3: data has 2 rows"),
        (
            lambda t: set_column(t, "episode_index", [*t["episode_index"].to_pylist()[:-1], 9]),
            "episode 3: data has 0",
        ),
        (
            lambda t: set_column(t, "frame_index", [5, *t["frame_index"].to_pylist()[1:]]),
            "expected frame_index 0",
        ),
        (lambda t: t.drop_columns(["action"]), "rows cannot be read"),
        (lambda t: set_column(t, "task_index", [7] * 25), "names task 7"),
    ],
)
def test_rows_that_contradict_the_metadata_are_user_errors(own_corpus, change, words):
    edit(next(own_corpus.glob("data/*/*.parquet")), change)
    with pytest.raises(UserError, match=words):
        open_windows(own_corpus)


def test_missing_and_broken_videos_are_user_errors(own_corpus):
    video = next((own_corpus / "videos" / WRIST).rglob("*.mp4"))
    whole = video.read_bytes()
    video.unlink()
    with pytest.raises(UserError, match=r"file-000\.mp4: no such video; camera"):
        open_windows(own_corpus)
    open_windows(own_corpus, cameras=[FRONT]).window(0)  # the other camera does not need it
    video.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"file-000\.mp4: cannot be"):
        open_windows(own_corpus).window(0)
    shutil.copyfile(
        next((own_corpus / "videos" / FRONT).rglob("*.mp4")), video
    )  # whole, but wrong frames: not seen
    (own_corpus / "videos" / FRONT / "chunk-000" / "file-000.mp4").write_bytes(b"")
    with pytest.raises(UserError, match=r"file-000\.mp4: cannot be opened"):
        open_windows(own_corpus).window(0)


@pytest.mark.parametrize("template", ["../{video_key}/{file_index}.mp4", "/tmp/{file_index}.mp4"])
def test_video_paths_that_lead_out_of_the_dataset_are_refused(own_corpus, template):
    info = json.loads((own_corpus / "meta/info.json").read_text())
    info["video_path"] = template
    (own_corpus / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="leads out of the dataset"):
        open_windows(own_corpus)


def test_indices_outside_are_index_errors(corpus):
    windows = open_windows(corpus)
    for indices in ([-1], [25], []):
        with pytest.raises(IndexError):
            windows.batch(indices)


# Shuffling. Windows carry their row: state is [episode, frame], so a batch tells which rows it holds.


def rows_of(batch: dict) -> list[tuple[int, int]]:
    return list(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist(), strict=True))


@pytest.fixture
def rows_only(corpus) -> EpisodeWindows:
    return open_windows(corpus, cameras=[], frame_offsets=[])


def epoch_rows(windows: EpisodeWindows, **options) -> list[tuple[int, int]]:
    return [
        row
        for batch in ShuffledBatches(windows, 2, epochs=1, drop_last=False, **options)
        for row in rows_of(batch)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("buffer_episodes", [1, 2, 100])
def test_ranks_together_see_every_window_once_an_epoch(rows_only, world_size, buffer_episodes):
    options = {"world_size": world_size, "buffer_episodes": buffer_episodes, "seed": 3}
    parts = [epoch_rows(rows_only, rank=rank, **options) for rank in range(world_size)]
    every = [(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)]
    assert sorted(row for part in parts for row in part) == every
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_drop_last_gives_all_ranks_equally_many_full_batches(rows_only):
    counts = set()
    for rank in range(4):
        batches = list(ShuffledBatches(rows_only, 3, rank=rank, world_size=4, epochs=1))
        assert all(len(batch["task"]) == 3 for batch in batches)
        counts.add(len(batches))
    assert counts == {2}  # 25 windows, 12 a global batch


def test_seed_and_epoch_change_the_order_and_nothing_else_does(rows_only):
    assert epoch_rows(rows_only, seed=1) == epoch_rows(rows_only, seed=1, prefetch=3)
    assert epoch_rows(rows_only, seed=1) != epoch_rows(rows_only, seed=2)
    two = ShuffledBatches(rows_only, 25, seed=1, epochs=2)
    first, second = (rows_of(batch) for batch in two)
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("stop_at", [0, 1, 5, 6, 11])
def test_resume_continues_batch_for_batch(rows_only, stop_at, prefetch):
    def make() -> ShuffledBatches:
        return ShuffledBatches(rows_only, 2, rank=1, world_size=2, buffer_episodes=2, prefetch=prefetch)

    whole = make()
    wanted = [rows_of(next(whole)) for _ in range(18)]  # three epochs of 6
    before = make()
    for batch in wanted[:stop_at]:
        assert rows_of(next(before)) == batch
    state = json.loads(json.dumps(before.state_dict()))
    after = make()
    next(after)  # what was made before loading is forgotten
    after.load_state_dict(state)
    assert [rows_of(next(after)) for _ in wanted[stop_at:]] == wanted[stop_at:]


def test_resume_on_more_ranks_stays_at_the_same_part_of_the_epoch(rows_only):
    two = ShuffledBatches(rows_only, 2, rank=0, world_size=2)
    for _ in range(10):
        next(two)
    four = ShuffledBatches(rows_only, 2, rank=3, world_size=4)
    four.load_state_dict(two.state_dict())
    assert (four.epoch, four.position) == (1, 2)  # 16 of 25 windows


def test_full_buffer_mixes_evenly_and_a_small_one_keeps_to_its_episodes(tmp_path):
    windows = open_windows(
        write_corpus(tmp_path / "many", [10] * 40, use_videos=False), cameras=[], frame_offsets=[]
    )
    spread = {}
    for buffer_episodes in (5, 40):
        order = [row[0] for row in epoch_rows(windows, buffer_episodes=buffer_episodes)]
        # Distinct episodes among 100 windows in a row, anywhere in the epoch.
        spread[buffer_episodes] = [len(set(order[at : at + 100])) for at in range(0, 301, 20)]
    # 100 of 400 windows of 40 episodes leave out about 2. With 5 mixed, 10 come and up to 5 are open.
    assert min(spread[40]) > 32
    assert min(spread[5]) >= 10
    assert max(spread[5]) <= 17


def test_small_cache_decodes_each_episode_about_once_an_epoch(tmp_path):
    decoded: list[int] = []

    def count(frames: Tensor) -> Tensor:
        decoded.append(len(frames))
        return frames[:, :, ::8, ::8]

    root = write_corpus(tmp_path / "many", [6] * 30, use_videos=False)
    episode_bytes = 6 * 3 * 8 * 12
    windows = open_windows(
        root, cameras=[FRONT], frame_transform=count, cache_gib=10.5 * episode_bytes / 2**30
    )
    batches = ShuffledBatches(windows, 4, epochs=1, drop_last=False)
    assert batches.state_dict()["buffer_episodes"] == 8
    decoded.clear()
    assert sum(len(batch["task"]) for batch in batches) == 180
    # 30, the buffer once more around the end of the epoch, and a few that were dropped too early.
    assert len(decoded) <= 30 + 8 + 8


def test_subset_of_episodes(rows_only):
    assert sorted(epoch_rows(rows_only, episodes=[3, 1])) == [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (3, 0)]
    with pytest.raises(UserError, match="episodes 1 to 4 asked for, there are 0 to 3"):
        ShuffledBatches(rows_only, 1, episodes=[1, 4])
    with pytest.raises(UserError, match="none asked for"):
        ShuffledBatches(rows_only, 1, episodes=[])


def test_corpus_too_small_for_a_batch_is_a_user_error(rows_only):
    with pytest.raises(UserError, match="25 windows are too few for a batch of 13 on each of 2 ranks"):
        ShuffledBatches(rows_only, 13, world_size=2)

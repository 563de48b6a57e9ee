"""metrics.jsonl holds each step once, whatever happened to the run."""

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flywheel_shared.metrics import MetricLogger
from flywheel_shared.optimizer import learning_rate_at


def write(folder: Path, first: int, last: int, value: float) -> None:
    logger = MetricLogger(folder, 0, step=first - 1, max_steps=9)
    for step in range(first, last + 1):
        logger.log(step, {"train/loss": value, "train/loss/video": value / 2})
    logger.close()


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_drops_the_rows_past_its_step(tmp_path):
    write(tmp_path, 1, 5, 1.0)
    write(tmp_path, 4, 6, 2.0)
    assert [(row["step"], row["train/loss"]) for row in rows(tmp_path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
        (5, 2.0),
        (6, 2.0),
    ]


def test_a_row_cut_short_by_a_kill_is_dropped(tmp_path):
    write(tmp_path, 1, 3, 1.0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])
    write(tmp_path, 3, 4, 2.0)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_what_is_not_finite_is_null(tmp_path):
    """NaN is no JSON, and a browser would refuse the file."""
    write(tmp_path, 1, 1, math.nan)
    assert rows(tmp_path)[0]["train/loss"] is None


def test_tensorboard_shows_the_resumed_curve(tmp_path):
    write(tmp_path, 1, 5, 1.0)
    write(tmp_path, 4, 6, 2.0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (step, 1.0 if step < 4 else 2.0) for step in range(1, 7)
    ]


def test_other_ranks_write_nothing(tmp_path, capsys):
    logger = MetricLogger(tmp_path / "run", 1)
    logger.log(1, {"train/loss": 1.0})
    logger.say("hello")
    logger.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_the_line_names_step_and_terms(tmp_path, capsys):
    write(tmp_path, 2, 2, 0.25)
    assert capsys.readouterr().out == "step 2/9  loss 0.2500  video 0.1250\n"


def test_the_learning_rate_warms_up_in_a_line_and_falls_in_half_a_cosine():
    given = {"peak": 2.0, "warmup_steps": 4, "max_steps": 12, "min_ratio": 0.1}
    rates = [learning_rate_at(step, **given) for step in range(1, 13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[7] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[11] == pytest.approx(0.2)
    assert rates[3:] == sorted(rates[3:], reverse=True)

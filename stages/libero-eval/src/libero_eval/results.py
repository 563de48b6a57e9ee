"""What an evaluation found: a row an episode, and rates with their intervals."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

# A policy is judged by the first two alone. The others say that it could not be: the server was away, late or
# reported an error, the episode ran out of wall time, or the simulator broke.
Outcome = Literal[
    "success",
    "failure",
    "policy_unavailable",
    "policy_timeout",
    "policy_error",
    "episode_timeout",
    "simulator_error",
]
EVALUATED: tuple[Outcome, ...] = ("success", "failure")

_Z_95 = 1.959963984540054  # 97.5% quantile of the standard normal distribution


@dataclasses.dataclass(frozen=True)
class Job:
    """One episode to run; `seed` displaces the object where a spread is asked for."""

    index: int
    task_id: int
    init_state: int
    repeat: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Episode:
    """One episode that was run, or why it was not.

    `steps` counts up to the first success. `latency_ms` is the time from request to reply as the simulator
    sees it, one a query; `server_ms` what the server says of it.
    """

    job: Job
    outcome: Outcome
    detail: str = ""
    instruction: str = ""
    success_once: bool = False
    success_at_end: bool = False
    steps: int = 0
    wall_s: float = 0.0
    latency_ms: tuple[float, ...] = ()
    server_ms: tuple[float, ...] = ()
    video: str | None = None

    def row(self) -> dict[str, Any]:
        """For episodes.jsonl."""
        return {
            "episode": self.job.index,
            "task_id": self.job.task_id,
            "instruction": self.instruction,
            "init_state": self.job.init_state,
            "repeat": self.job.repeat,
            "seed": self.job.seed,
            "outcome": self.outcome,
            "detail": self.detail,
            "success_once": self.success_once,
            "success_at_end": self.success_at_end,
            "steps": self.steps,
            "wall_s": round(self.wall_s, 3),
            "queries": len(self.latency_ms),
            "policy_latency_ms": percentiles(self.latency_ms),
            "video": self.video,
        }


def wilson_95(successes: int, trials: int) -> tuple[float, float] | None:
    """The Wilson score interval at 95% of a rate, as fractions of one; None without trials.

    Wilson (1927): the rates that a two-sided normal test at 5% does not reject. It holds for few trials and
    for rates near 0 and 1, where the textbook interval (rate +- z * standard error) does not.
    """
    if trials == 0:
        return None
    rate, denominator = successes / trials, 1 + _Z_95**2 / trials
    centre = (rate + _Z_95**2 / (2 * trials)) / denominator
    half = _Z_95 / denominator * math.sqrt(rate * (1 - rate) / trials + _Z_95**2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """`p50` and `p95`, to a hundredth; None where there are no values."""
    if not values:
        return None
    p50, p95 = np.percentile(values, (50, 95))
    return {"p50": round(float(p50), 2), "p95": round(float(p95), 2)}


def summarise(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Rates over the episodes in which the policy could be judged, and counts of all outcomes."""
    judged = [episode for episode in episodes if episode.outcome in EVALUATED]
    once = sum(episode.success_once for episode in judged)
    at_end = sum(episode.success_at_end for episode in judged)
    steps = [episode.steps for episode in judged]
    winning = [episode.steps for episode in judged if episode.success_once]
    return {
        "episodes": len(judged),
        "not_evaluated": len(episodes) - len(judged),
        "outcomes": dict(Counter(episode.outcome for episode in episodes)),
        "success_once": _rate(once, len(judged)),
        "success_at_end": _rate(at_end, len(judged)),
        "steps": sum(steps),
        "mean_steps": round(sum(steps) / len(steps), 2) if steps else None,
        "mean_steps_to_success": round(sum(winning) / len(winning), 2) if winning else None,
        "episode_wall_s": round(sum(episode.wall_s for episode in episodes), 3),
        "queries": sum(len(episode.latency_ms) for episode in episodes),
        "policy_latency_ms": percentiles([ms for episode in episodes for ms in episode.latency_ms]),
        "policy_server_ms": percentiles([ms for episode in episodes for ms in episode.server_ms]),
    }


def per_task(episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """`summarise` of each task, by task id."""
    tasks = sorted({episode.job.task_id for episode in episodes})
    by_task = {task: [episode for episode in episodes if episode.job.task_id == task] for task in tasks}
    return [
        {
            "task_id": task,
            "instruction": next((one.instruction for one in members if one.instruction), ""),
            "init_states": sorted({one.job.init_state for one in members}),
            **summarise(members),
        }
        for task, members in by_task.items()
    ]


def write_rows(path: Path, episodes: Sequence[Episode]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(episode.row()) + "\n" for episode in episodes))


def plain_json(value: Any) -> Any:
    """What a foreign server says of itself, as JSON whatever it is."""
    if isinstance(value, dict):
        return {str(key): plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain_json(value.tolist())
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return repr(value)


def _rate(successes: int, trials: int) -> dict[str, Any]:
    return {
        "successes": successes,
        "rate": successes / trials if trials else None,
        "wilson_95": wilson_95(successes, trials),
    }

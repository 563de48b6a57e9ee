"""`libero-eval run`, from top to bottom: ask the server what it is, run all episodes, count, write."""

import dataclasses
import datetime
import json
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flywheel_shared.errors import UserError
from flywheel_shared.policy_protocol import PolicyError
from libero_eval.policy_link import ACTION_DIM, PolicyLink
from libero_eval.results import EVALUATED, Episode, Job, per_task, plain_json, summarise, write_rows
from libero_eval.settings import Recipe, parse_indices
from libero_eval.videos import write_contact_sheet
from libero_eval.workers import Assignment, Report, run_jobs

_HOPELESS = (
    3  # episodes lost to the simulator before any other outcome: a broken set-up, the rest is not tried
)


class NothingEvaluated(Exception):
    """Not one episode could judge the policy; the message is the cause."""


def evaluate(
    recipe: Recipe,
    uri: str,
    output: Path,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Evaluate the policy at `uri` (ws://host:port) and write `output`; gives the content of results.json.

    Raises:
        UserError: if the output exists, or the server's policy does not fit what is asked.
        NothingEvaluated: if no episode could be judged; nothing is left at `output`.
    """
    started, began = time.monotonic(), datetime.datetime.now(datetime.UTC)
    _refuse_existing(output, overwrite)
    metadata = _ask_metadata(uri, recipe)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    (partial / "videos").mkdir(parents=True)
    try:
        jobs = make_jobs(recipe)
        assignment = Assignment(recipe.simulator, recipe.run, uri, partial, uuid.uuid4().hex)
        reports = []
        for report in run_jobs(jobs, assignment):
            reports.append(report)
            say(_line(report.episode, len(reports), len(jobs)))
            lost = sum(one.episode.outcome == "simulator_error" for one in reports)
            if lost == len(reports) == _HOPELESS:
                break
        reports.sort(key=lambda report: report.episode.job.index)
        if not any(report.episode.outcome in EVALUATED for report in reports):
            first = reports[0].episode
            raise NothingEvaluated(f"none of {len(reports)} episodes: {first.outcome}: {first.detail}")
        episodes = keep_videos([report.episode for report in reports], recipe.run.videos, partial)
        write_rows(partial / "episodes.jsonl", episodes)
        pictures = [report.pictures for report in reports]
        write_contact_sheet(partial / "contact_sheet.png", list(zip(episodes, pictures, strict=True)))
        results = {
            **_conditions(recipe, uri, metadata, reports),
            "started_at": began.isoformat(timespec="seconds"),
            "wall_s": round(time.monotonic() - started, 3),
            "overall": summarise(episodes),
            "tasks": per_task(episodes),
        }
        (partial / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        _put_in_place(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return results


def make_jobs(recipe: Recipe) -> list[Job]:
    """Every initial state of every task, by task, so that a worker seldom has to build another simulator."""
    run = recipe.run
    asked = [
        (task_id, init_state, repeat)
        for task_id in parse_indices(run.tasks)
        for init_state in parse_indices(run.init_states)
        for repeat in range(run.episodes_per_state)
    ]
    return [
        Job(index, *which, seed=int(np.random.SeedSequence([run.seed, *which]).generate_state(1)[0]))
        for index, which in enumerate(asked)
    ]


def keep_videos(episodes: list[Episode], count: int, folder: Path) -> list[Episode]:
    """Keep `count` videos, successes and failures in turn as far as there are both; remove the others."""
    filmed = [episode for episode in episodes if episode.video and episode.outcome in EVALUATED]
    kinds = [[one for one in filmed if one.outcome == outcome] for outcome in EVALUATED]
    turns = sorted(
        (turn, kind, one.job.index) for kind, same in enumerate(kinds) for turn, one in enumerate(same)
    )
    kept = {index for _, _, index in turns[:count]}
    for episode in episodes:
        if episode.video and episode.job.index not in kept:
            (folder / episode.video).unlink()
    return [one if one.job.index in kept else dataclasses.replace(one, video=None) for one in episodes]


def check_metadata(metadata: dict[str, Any], recipe: Recipe) -> None:
    """Raise UserError where the server says of itself that it cannot do what is asked."""
    rate_hz, horizon, dim = (metadata.get(key) for key in ("rate_hz", "action_horizon", "action_dim"))
    if isinstance(rate_hz, int | float) and abs(rate_hz - recipe.simulator.rate_hz) > 1e-6:
        raise UserError(
            f"the policy acts at {rate_hz:g} Hz, the simulator would run at {recipe.simulator.rate_hz} Hz: "
            f"give --rate {rate_hz:g}"
        )
    if isinstance(horizon, int) and horizon < recipe.run.execute:
        raise UserError(
            f"--execute: found {recipe.run.execute}, but the policy's chunks have {horizon} actions"
        )
    if isinstance(dim, int) and dim != ACTION_DIM:
        raise UserError(f"the policy's actions have {dim} numbers, LIBERO's have {ACTION_DIM}")


def _ask_metadata(uri: str, recipe: Recipe) -> dict[str, Any]:
    """The server's metadata, checked, before any simulator is built."""
    link = PolicyLink(uri, recipe.run.request_timeout_s, recipe.run.reconnect_s)
    try:
        metadata = link.begin_episode()
    except PolicyError as error:
        raise NothingEvaluated(str(error)) from None
    finally:
        link.close()
    check_metadata(metadata, recipe)
    return metadata


def _conditions(recipe: Recipe, uri: str, metadata: dict[str, Any], reports: list[Report]) -> dict[str, Any]:
    """All that a rate depends on."""
    run, simulator = recipe.run, recipe.simulator
    return {
        "format": 1,
        "suite": simulator.suite,
        "init_states": parse_indices(run.init_states),
        "episodes_per_state": run.episodes_per_state,
        "blank_cameras": run.blank_cameras,
        "spread_m": run.spread_m,
        "seed": run.seed,
        "rate_hz": simulator.rate_hz,
        "execute": run.execute,
        "max_steps": run.max_steps,
        "workers": run.workers,
        "rendering": {"profile": simulator.rendering, "size": simulator.size, "frames": run.render},
        "versions": next((report.versions for report in reports if report.versions), {}),
        "server": {"uri": uri, "metadata": plain_json(metadata)},
    }


def _line(episode: Episode, number: int, of: int) -> str:
    job = episode.job
    what = f"{episode.outcome} after {episode.steps} steps, {episode.wall_s:.1f} s"
    detail = f": {episode.detail}" if episode.detail else ""
    return f"{number}/{of}: task {job.task_id}, state {job.init_state}: {what}{detail}"


def _refuse_existing(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise UserError(f"{output}: exists already; choose another --output, or replace it with --overwrite")
    if not (output / "results.json").is_file():
        raise UserError(
            f"{output}: holds no results.json, so it is no evaluation; --overwrite will not replace it"
        )


def _put_in_place(partial: Path, output: Path) -> None:
    old = output.with_name(f".{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        output.rename(old)
    partial.rename(output)
    shutil.rmtree(old, ignore_errors=True)

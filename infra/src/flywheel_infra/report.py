"""report.html: one self-contained page about a run, made from what its folder holds."""

import base64
import mimetypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flywheel_infra import run_folder
from flywheel_infra.charts import line_chart
from flywheel_infra.facts import (
    Facts,
    corpus_facts,
    evaluation_facts,
    machine_facts,
    package_facts,
    training_facts,
)
from flywheel_infra.ledger import Ledger
from flywheel_infra.run_folder import Evaluation, Training
from flywheel_shared.errors import UserError

VIDEOS_MAX_MIB = 24  # of all videos together; a phone must still open the page
CURVES = [
    ("train/loss", "Total loss"),
    ("train/loss/video", "Video loss"),
    ("train/loss/action", "Action loss"),
]


def write_report(root: Path, output: Path) -> None:
    """Render the page about the run in `root`; written beside and renamed.

    Raises UserError where `root` is no run's folder or a file of it is broken. What is absent yet (an
    evaluation, a curve) is left out.
    """
    ledger = Ledger.load(root)
    if ledger is None:
        raise UserError(f"{root}: no flywheel.json, so this is no folder of `flywheel run`")
    environment = Environment(
        loader=PackageLoader("flywheel_infra"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["percent"] = lambda value: f"{value:.0%}"
    environment.filters["points"] = lambda value: f"{value * 100:+.0f}"
    page = environment.get_template("report.html.j2").render(context(root, ledger))
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(f".{output.name}.tmp")
    beside.write_text(page)
    beside.replace(output)


def context(root: Path, ledger: Ledger) -> dict[str, Any]:
    """Everything that the template names."""
    evaluations, trainings = run_folder.evaluations(root), run_folder.trainings(root)
    budget = VIDEOS_MAX_MIB * 2**20
    shown = [_evaluation(evaluation, budget / len(evaluations)) for evaluation in evaluations]
    total_s = sum(record.wall_s for record in ledger.steps.values())
    finished = max((record.finished_at or record.started_at for record in ledger.steps.values()), default="")
    return {
        "profile": ledger.profile,
        "date": finished.replace("T", " ").replace("+00:00", " UTC"),
        "commit": ledger.commit,
        "headline": _headline(evaluations),
        "evaluations": shown,
        "difference": _difference(evaluations),
        "meaning": _meaning(root, evaluations),
        "trainings": [_training(training) for training in trainings],
        "steps": _steps(root, ledger, total_s),
        "total": f"All steps took {duration(total_s)}; set-up before them {duration(ledger.setup_s)}.",
        "cards": [
            *(
                {"title": f"Corpus: {path.name}", "facts": corpus_facts(path)}
                for path in _folders(root / "corpus")
            ),
            *(
                {"title": f"Training: {run.name}", "facts": training_facts(root, run, ledger)}
                for run in trainings
            ),
            *({"title": "Simulator", "facts": evaluation_facts(run)} for run in evaluations[:1]),
            {"title": "Machine", "facts": machine_facts(ledger)},
        ],
        "lists": package_facts(ledger),
    }


def _headline(evaluations: list[Evaluation]) -> str:
    seeing = [evaluation for evaluation in evaluations if not evaluation.is_blank]
    if not seeing:
        return "A run without an evaluation yet"
    rate = seeing[0].success_once
    return f"The policy succeeds in {rate.successes} of {rate.trials} initial states"


def _meaning(root: Path, evaluations: list[Evaluation]) -> str:
    if not evaluations:
        return "No policy was evaluated."
    rate = evaluations[0].success_once
    unseen = run_folder.is_unseen(root, evaluations[0])
    states = "initial states that no demonstration used" if unseen else "initial states"
    return (
        "Success is success_once: the simulator called the task done at any step of the episode, "
        f"over {rate.trials} {states}."
    )


def _difference(evaluations: list[Evaluation]) -> dict[str, float] | None:
    seeing = [run.success_once for run in evaluations if not run.is_blank]
    blank = [run.success_once for run in evaluations if run.is_blank]
    if not seeing or not blank:
        return None
    value, low, high = seeing[0].minus(blank[0])
    return {"value": value, "low": low, "high": high}


def _evaluation(evaluation: Evaluation, budget: float) -> dict[str, Any]:
    videos, used = [], 0
    for row in evaluation.episodes:
        path = evaluation.folder / str(row.get("video") or "")
        if not path.is_file() or used + path.stat().st_size > budget:
            continue
        used += path.stat().st_size
        label = f"initial state {row['init_state']}, {row['steps']} steps"
        mark = row["outcome"].replace("_", " ").capitalize()
        videos.append({"uri": data_uri(path), "mark": mark, "good": row["success_once"], "label": label})
    sheet = evaluation.folder / "contact_sheet.png"
    instructions = list(dict.fromkeys(task["instruction"] for task in evaluation.results["tasks"]))
    return {
        "is_blank": evaluation.is_blank,
        "title": evaluation.title,
        "success_once": evaluation.success_once,
        "caption": "“" + "”, “".join(instructions) + "”, closed loop, as the policy's camera sees it.",
        "not_evaluated": evaluation.results["overall"]["not_evaluated"],
        "videos": videos,
        "sheet": data_uri(sheet) if sheet.is_file() else None,
    }


def _training(training: Training) -> dict[str, Any]:
    charts = []
    for metric, title in CURVES:
        points = training.series(metric)
        svg = line_chart(points, f"{title} of {training.name} over {len(points)} steps")
        if svg:
            charts.append({"title": title, "last": f"{points[-1][1]:.3g}", "svg": Markup(svg)})  # noqa: S704
    return {
        "charts": charts,
        "caption": f"Over {training.last_step:,} optimiser steps: each faint, their moving mean strong.",
    }


def _steps(root: Path, ledger: Ledger, total_s: float) -> list[dict[str, Any]]:
    facts = Facts(root, ledger)
    longest = max((record.wall_s for record in ledger.steps.values()), default=0.0) or 1.0
    return [
        {
            "name": name,
            "made": facts.made(name),
            "attempts": record.attempts,
            "time": duration(record.wall_s),
            "size": size(record.size_bytes) if record.size_bytes else "–",
            "share": f"{100 * record.wall_s / longest:.1f}",
        }
        for name, record in ledger.steps.items()
        if record.state == "done"
    ]


def _folders(path: Path) -> Iterable[Path]:
    return sorted(child for child in path.glob("*") if (child / "meta" / "info.json").is_file())


def data_uri(path: Path) -> str:
    """The file's content as a data: address."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def duration(seconds: float) -> str:
    """`4.2 s`, `48 s`, `7 min 05 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def size(count: int) -> str:
    """Bytes in binary units, to three digits."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}"

"""report.html: one self-contained page about a run, made from what its folder holds."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flywheel_infra import run_folder, side_by_side
from flywheel_infra.charts import line_chart
from flywheel_infra.clips import clip_folders
from flywheel_infra.corpora import Corpus, mixes, were_demonstrated
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
from flywheel_infra.words import data_uri, duration
from flywheel_shared.errors import UserError

VIDEOS_MAX_MIB = 24  # of all videos together; a phone must still open the page
VIDEOS_EACH_OF_SEVERAL = 4  # rollouts an evaluation where several are shown; the sheet has all
COLOURS = 4  # that the page has for turns
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
    environment.filters["colour"] = colour
    environment.filters["points"] = lambda value: f"{value * 100:+.0f}"
    page = environment.get_template("report.html.j2").render(context(root, ledger))
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(f".{output.name}.tmp")
    beside.write_text(page)
    beside.replace(output)


def colour(turn: int) -> int:
    """Number of the turn's colour on the page, from 1."""
    return (turn - 1) % COLOURS + 1


def context(root: Path, ledger: Ledger) -> dict[str, Any]:
    """Everything that the template names."""
    facts = Facts(root, ledger)
    evaluations, trainings, datasets = facts.evaluations, facts.trainings, facts.corpora
    # Turns and policies side by side where there are several; else the one evaluation with more room.
    several = ledger.turns > 1 or len({evaluation.policy for evaluation in evaluations}) > 1
    finished = max(
        (record.finished_at or record.started_at for record in ledger.asked().values()), default=""
    )
    return {
        "profile": ledger.profile,
        "date": finished.replace("T", " ").replace("+00:00", " UTC"),
        "commit": ledger.commit,
        "turns": ledger.turns,
        "headline": _headline(evaluations),
        "policies": side_by_side.policies(evaluations, datasets) if several else [],
        "evaluations": _evaluations(evaluations, several),
        "difference": None if several else _difference(evaluations),
        "meaning": _meaning(datasets, evaluations, several),
        "data": side_by_side.data(mixes(datasets, trainings, ledger.turns)),
        "generated": side_by_side.generated(clip_folders(root, ledger)),
        "trainings": _trainings(trainings, ledger.turns),
        "steps": _steps(facts, ledger),
        "steps_of_turns": side_by_side.steps(facts, ledger) if ledger.turns > 1 else None,
        "cards": [
            *({"title": f"Corpus: {corpus.path.name}", "facts": corpus_facts(corpus)} for corpus in datasets),
            *(
                {"title": f"Training: {run.name}", "facts": training_facts(root, run, ledger)}
                for run in trainings
            ),
            *({"title": "Simulator", "facts": evaluation_facts(run)} for run in evaluations[:1]),
            {"title": "Machine", "facts": machine_facts(ledger)},
        ],
        "lists": package_facts(ledger),
    }


def _headline(evaluations: Sequence[Evaluation]) -> str:
    """`The policy succeeds in 10 of 14 initial states`; of several turns one count after the other."""
    seeing = [evaluation for evaluation in evaluations if not evaluation.is_blank]
    if not seeing:
        return "A run without an evaluation yet"
    said = {}
    for policy, runs in groupby(seeing, key=lambda evaluation: evaluation.policy):
        rates = [run.success_once for run in runs]
        said[policy] = ", then ".join(f"{rate.successes} of {rate.trials}" for rate in rates)
    if len(said) == 1:
        return f"The policy succeeds in {said.popitem()[1]} initial states"
    return "Success in initial states: " + "; ".join(f"{name} {counts}" for name, counts in said.items())


def _meaning(datasets: Sequence[Corpus], evaluations: Sequence[Evaluation], several: bool) -> str:
    if not evaluations:
        return "No policy was evaluated."
    said = "Success is success_once: the simulator called the task done at any step of the episode"
    if several:
        return f"{said}."
    unseen = were_demonstrated(datasets, evaluations[0]) is False
    states = "initial states that no demonstration used" if unseen else "initial states"
    return f"{said}, over {evaluations[0].success_once.trials} {states}."


def _difference(evaluations: Sequence[Evaluation]) -> dict[str, float] | None:
    seeing = [run.success_once for run in evaluations if not run.is_blank]
    blank = [run.success_once for run in evaluations if run.is_blank]
    return side_by_side.difference(seeing[0], blank[0]) if seeing and blank else None


def _evaluations(evaluations: Sequence[Evaluation], several: bool) -> list[dict[str, Any]]:
    budget = VIDEOS_MAX_MIB * 2**20 / max(len(evaluations), 1)
    most = VIDEOS_EACH_OF_SEVERAL if several else None
    titles = run_folder.titles(evaluations)
    return [
        _evaluation(evaluation, title, budget, 0 if several and evaluation.is_blank else most)
        for evaluation, title in zip(evaluations, titles, strict=True)
    ]


def _evaluation(evaluation: Evaluation, title: str, budget: float, most: int | None) -> dict[str, Any]:
    videos: list[dict[str, Any]] = []
    used = 0
    for row in evaluation.episodes:
        path = evaluation.folder / str(row.get("video") or "")
        if len(videos) == most:
            break
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
        "title": title,
        "success_once": evaluation.success_once,
        "caption": "“" + "”, “".join(instructions) + "”, closed loop, as the policy's camera sees it.",
        "not_evaluated": evaluation.results["overall"]["not_evaluated"],
        "videos": videos,
        "sheet": data_uri(sheet) if sheet.is_file() else None,
    }


def _trainings(trainings: Sequence[Training], turns: int) -> list[dict[str, Any]]:
    """Per model the curves of all its turns, a chart a metric."""
    shown = []
    for model, of_model in groupby(trainings, key=lambda training: training.model):
        runs = list(of_model)
        charts = []
        for metric, title in CURVES:
            curves = [(run.turn, points) for run in runs if (points := run.series(metric))]
            drawn = [(f"turn-{colour(turn)}" if turns > 1 else "only", points) for turn, points in curves]
            lengths = " and ".join(str(len(points)) for _, points in curves)
            if svg := line_chart(drawn, f"{title} of {model} over {lengths} steps"):
                lasts = [(turn, f"{points[-1][1]:.3g}") for turn, points in curves]
                charts.append({"title": title, "lasts": lasts, "svg": Markup(svg)})  # noqa: S704
        steps = " and ".join(f"{run.last_step:,}" for run in runs)
        caption = f"Over {steps} optimiser steps: each faint, their moving mean strong."
        shown.append({"model": model, "charts": charts, "caption": caption})
    return shown


def _steps(facts: Facts, ledger: Ledger) -> dict[str, Any]:
    """A row a step of the one turn."""
    records = ledger.asked()
    longest = max((record.wall_s for record in records.values()), default=0.0) or 1.0
    rows = [
        {"name": name, **side_by_side.cell(facts, name, record, longest)}
        for name, record in records.items()
        if record.state == "done"
    ]
    total_s = sum(record.wall_s for record in records.values())
    total = f"All steps took {duration(total_s)}; set-up before them {duration(ledger.setup_s)}."
    return {"rows": rows, "total": total}

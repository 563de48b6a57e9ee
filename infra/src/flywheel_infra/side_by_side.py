"""What the report shows of several turns or policies next to each other."""

from collections.abc import Sequence
from typing import Any

from flywheel_infra.clips import Clip, ClipFolder
from flywheel_infra.corpora import KINDS, Corpus, Mix, were_demonstrated
from flywheel_infra.facts import Facts
from flywheel_infra.ledger import Ledger, StepRecord, split_turn
from flywheel_infra.run_folder import Evaluation, Rate
from flywheel_infra.words import data_uri, duration, size

CLIPS_PER_TURN = 4
CLIPS_MAX_MIB = 8  # of all generated and real clips together
STATES = {
    True: "Some of these initial states were demonstrated by then.",
    False: "No demonstration used these initial states.",
    None: "",
}


def policies(evaluations: Sequence[Evaluation], corpora: Sequence[Corpus]) -> list[dict[str, Any]]:
    """Per policy its turns, each with its success and that of the same policy with blanked cameras."""
    shown = []
    for policy in dict.fromkeys(one.policy for one in evaluations):
        of_policy = [one for one in evaluations if one.policy == policy]
        seeing = {one.turn: one for one in of_policy if not one.is_blank}
        blank = {one.turn: one for one in of_policy if one.is_blank}
        turns = [
            {
                "turn": turn,
                "seeing": evaluation.success_once,
                "blank": blank[turn].success_once if turn in blank else None,
                "not_evaluated": evaluation.results["overall"]["not_evaluated"],
                "states": STATES[were_demonstrated(corpora, evaluation)],
            }
            for turn, evaluation in seeing.items()
        ]
        rates = [evaluation.success_once for evaluation in seeing.values()]
        shown.append({"name": policy, "turns": turns, "changes": _changes(list(seeing), rates)})
    return [policy for policy in shown if policy["turns"]]


def _changes(turns: Sequence[int], rates: Sequence[Rate]) -> list[dict[str, Any]]:
    """Of each turn from the one before it, with the 95% interval."""
    return [
        {"turn": turns[at], "before": turns[at - 1], **difference(rates[at], rates[at - 1])}
        for at in range(1, len(turns))
    ]


def difference(one: Rate, other: Rate) -> dict[str, float]:
    """Of two rates, with the 95% interval."""
    value, low, high = one.minus(other)
    return {"value": value, "low": low, "high": high}


def data(mixes: Sequence[Mix]) -> list[dict[str, Any]]:
    """Per turn the episodes by kind; nothing where there is one kind in one turn and so no mix to show."""
    if len(mixes) < 2 and all(len(mix.episodes) < 2 for mix in mixes):
        return []
    largest = max(sum(mix.episodes.values()) for mix in mixes)
    return [
        {
            "title": f"Turn {mix.turn}" + (f", {mix.model}" if mix.model else ""),
            "total": sum(mix.episodes.values()),
            "parts": [
                {"kind": kind, "label": KINDS[kind], "count": count, "share": f"{100 * count / largest:.1f}"}
                for kind, count in mix.episodes.items()
            ],
        }
        for mix in mixes
    ]


def generated(folders: Sequence[ClipFolder]) -> list[dict[str, Any]]:
    """Per turn a few generated clips beside the real ones, and what was measured and kept of all."""
    turns, used = [], 0.0
    for turn in dict.fromkeys(folder.turn for folder in folders):
        these = [folder for folder in folders if folder.turn == turn]
        clips = {clip.uuid: clip for folder in these for clip in folder.clips}  # a curated one counts once
        pairs = []
        for clip in _spread(list(clips.values()), CLIPS_PER_TURN):
            files = [clip.generated, *([clip.real] if clip.real else [])]
            weight = sum(file.stat().st_size for file in files)
            if used + weight <= CLIPS_MAX_MIB * 2**20:
                used += weight
                pairs.append(_pair(clip))
        qualities = [_quality(folder.path.name, folder.quality) for folder in these if folder.quality]
        curations = [_curation(folder.path.name, folder.curation) for folder in these if folder.curation]
        turns.append({"turn": turn, "pairs": pairs, "qualities": qualities, "curations": curations})
    return turns


def _pair(clip: Clip) -> dict[str, Any]:
    return {
        "generated": data_uri(clip.generated),
        "real": data_uri(clip.real) if clip.real else None,
        "caption": clip.caption or clip.uuid,
    }


def _quality(name: str, said: dict[str, float]) -> dict[str, Any]:
    """Generated frames and the first frame copied, each against the real continuation."""
    rows = []
    for key, label, form in (("psnr_db", "PSNR, dB", "{:.1f}"), ("ssim", "SSIM", "{:.3f}")):
        ours, copied = said.get(key), said.get(f"copy_first_frame_{key}")
        if ours is not None and copied is not None:
            texts = [form.format(ours), form.format(copied), form.replace(":", ":+").format(ours - copied)]
            rows.append({"label": label, "texts": texts, "good": ours > copied})
    return {"name": name, "clips": said.get("clips"), "rows": rows}


def _curation(name: str, said: dict[str, Any]) -> dict[str, Any]:
    dropped = sorted(said.get("dropped", {}).items(), key=lambda item: -item[1])
    return {
        "name": name,
        "facts": [("Kept", f"{said['kept']:,}"), *((f"Dropped: {why}", f"{n:,}") for why, n in dropped)],
    }


def _spread(clips: Sequence[Clip], most: int) -> list[Clip]:
    """At most `most` of them, evenly spaced, those first whose real clip is there."""
    paired = [clip for clip in clips if clip.real] or list(clips)
    if len(paired) <= most:
        return paired
    return [paired[index * len(paired) // most] for index in range(most)]


def steps(facts: Facts, ledger: Ledger) -> dict[str, Any]:
    """A row a step, a cell a turn; a step that a run of several turns has once has one cell for all."""
    done = {
        split_turn(name): (name, record) for name, record in ledger.asked().items() if record.state == "done"
    }
    longest = max((record.wall_s for _, record in done.values()), default=0.0) or 1.0
    rows: list[dict[str, Any]] = []
    once_s, turn_s = 0.0, dict.fromkeys(range(1, ledger.turns + 1), 0.0)
    for step in dict.fromkeys(step for step, _ in done):
        cells = {
            turn: cell(facts, *done[step, turn], longest) if (step, turn) in done else None for turn in turn_s
        }
        once = cells[1] if not any(cells[turn] for turn in turn_s if turn > 1) else None
        rows.append({"name": step, "once": once, "cells": [] if once else list(cells.items())})
        for turn in [turn for turn in turn_s if cells[turn]]:
            seconds = done[step, turn][1].wall_s
            if once:
                once_s += seconds
            else:
                turn_s[turn] += seconds
    parts = [f"turn {turn} took {duration(seconds)}" for turn, seconds in turn_s.items()]
    total = (
        f"What is done once took {duration(once_s)}, {', '.join(parts)}; set-up {duration(ledger.setup_s)}."
    )
    return {"rows": rows, "turns": list(turn_s), "total": total}


def cell(facts: Facts, name: str, record: StepRecord, longest: float) -> dict[str, Any]:
    """What a step made, its time and size, and its time as a share of the longest step's."""
    return {
        "made": facts.made(name),
        "attempts": record.attempts,
        "time": duration(record.wall_s),
        "size": size(record.size_bytes) if record.size_bytes else "–",
        "share": f"{100 * record.wall_s / longest:.1f}",
    }

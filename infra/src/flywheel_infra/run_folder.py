"""What a run's folder holds, read for people: evaluations, training curves, sizes.

Only the forms that pass between stages are read (docs/architecture.md); no stage is imported.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flywheel_infra.ledger import Ledger
from flywheel_shared.errors import UserError

BLANK = "-blank"


@dataclass(frozen=True)
class Rate:
    """Successes among trials with the Wilson 95% interval, as fractions of one."""

    successes: int
    trials: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The plain fraction; 0 where nothing was tried."""
        return self.successes / self.trials if self.trials else 0.0

    def minus(self, other: "Rate") -> tuple[float, float, float]:
        """Difference and its 95% interval.

        Newcombe's hybrid score interval (1998, method 10), made of the two Wilson intervals; the trials are
        taken as independent.
        """
        difference = self.value - other.value
        below = math.hypot(self.value - self.low, other.high - other.value)
        above = math.hypot(self.high - self.value, other.value - other.low)
        return difference, max(-1.0, difference - below), min(1.0, difference + above)


@dataclass(frozen=True)
class Evaluation:
    """One folder under eval/."""

    policy: str
    turn: int
    results: dict[str, Any]
    episodes: list[dict[str, Any]]
    folder: Path

    @property
    def is_blank(self) -> bool:
        """Whether the policy's cameras were blanked."""
        return bool(self.results.get("blank_cameras"))

    @property
    def title(self) -> str:
        """For a heading."""
        return "cameras blanked" if self.is_blank else "policy with its cameras"

    @property
    def success_once(self) -> Rate:
        """Episodes that the simulator called successful at any step."""
        return self._rate("success_once")

    @property
    def success_at_end(self) -> Rate:
        """Episodes that were successful at their last step."""
        return self._rate("success_at_end")

    def _rate(self, key: str) -> Rate:
        found = self.results["overall"][key]
        low, high = found["wilson_95"]
        return Rate(found["successes"], self.results["overall"]["episodes"], low, high)

    def sentence(self) -> str:
        """The headline in words."""
        rate = self.success_once
        return (
            f"success_once {rate.successes} of {rate.trials} = {rate.value:.0%} "
            f"(95% interval {rate.low:.0%} to {rate.high:.0%})"
        )


def evaluations(root: Path, ledger: Ledger) -> list[Evaluation]:
    """Evaluations of the turns that the run was asked for, sighted policies first, then by policy and turn.

    eval/<policy>, or eval/<policy>-<turn>; a folder that was made with blanked cameras may have `-blank` at the
    end of either part.
    """
    found = []
    for path in sorted(root.glob("eval/*/results.json")):
        policy, turn = ledger.place(path.parent.name.removesuffix(BLANK))
        rows = read_lines(path.with_name("episodes.jsonl"))
        found.append(Evaluation(policy.removesuffix(BLANK), turn, read_json(path), rows, path.parent))
    asked = [evaluation for evaluation in found if evaluation.turn <= ledger.turns]
    return sorted(asked, key=lambda one: (one.is_blank, one.policy, one.turn))


def titles(evaluations: Sequence[Evaluation]) -> list[str]:
    """One an evaluation, with its policy and its turn where they differ among them."""
    policies, turns = {one.policy for one in evaluations}, {one.turn for one in evaluations}
    return [
        ", ".join([one.policy] * (len(policies) > 1) + [f"turn {one.turn}"] * (len(turns) > 1) + [one.title])
        for one in evaluations
    ]


@dataclass(frozen=True)
class Training:
    """The curves of one folder under checkpoints/."""

    name: str  # of the folder
    model: str  # the same without its turn
    turn: int
    rows: list[dict[str, float]] = field(repr=False)
    sources: list[dict[str, Any]] = field(default_factory=list)  # [{"name": corpus, "episodes": count}]

    def series(self, metric: str) -> list[tuple[float, float]]:
        """(step, value) wherever the metric was written and is finite."""
        points = [(row["step"], row[metric]) for row in self.rows if metric in row]
        return [
            (step, value) for step, value in points if isinstance(value, int | float) and math.isfinite(value)
        ]

    @property
    def last_step(self) -> int:
        """Of the last row."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def largest(self, metric: str) -> float | None:
        """Over the run."""
        return max((value for _, value in self.series(metric)), default=None)

    def median(self, metric: str) -> float | None:
        """Median over the run: what a step costs, untouched by the first one's warm-up."""
        values = sorted(value for _, value in self.series(metric))
        return values[len(values) // 2] if values else None


def trainings(root: Path, ledger: Ledger) -> list[Training]:
    """Training runs of the turns that the run was asked for, by model and turn.

    A step that was repeated after a kill counts once, by its last row. A row may name the `sources` trained on.
    """
    found = []
    for path in sorted(root.glob("checkpoints/*/metrics.jsonl")):
        by_step: dict[float, dict[str, float]] = {}
        sources: list[dict[str, Any]] = []
        for row in read_lines(path):
            sources = row.pop("sources", sources)
            if "step" in row:
                by_step[row["step"]] = by_step.get(row["step"], {}) | row
        rows = [by_step[step] for step in sorted(by_step)]
        found.append(Training(path.parent.name, *ledger.place(path.parent.name), rows, sources))
    asked = [training for training in found if training.turn <= ledger.turns]
    return sorted(asked, key=lambda one: (one.model, one.turn))


def parameters(export: Path) -> int:
    """Number of values in an export's safetensors files, from their headers alone."""
    total = 0
    for path in sorted(export.glob("model*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def read_json(path: Path) -> Any:
    """Parsed content; UserError naming the file where it is no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """One object a line. A last line cut short by a kill is left out; a broken one before it is an error."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise UserError(f"{path}: line {number} is not JSON: {error}") from None
    return rows

"""The datasets of a run: where their episodes come from, and which initial states were demonstrated."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flywheel_infra.ledger import Ledger
from flywheel_infra.run_folder import Evaluation, Training, read_json
from flywheel_shared.errors import UserError

# What meta/flywheel.json may call a corpus, and what a reader is told.
KINDS = {
    "recorded": "Recorded",
    "targets": "Recorded from failures",
    "labelled": "Generated, then labelled",
    "other": "Other",
}


@dataclass(frozen=True)
class Recording:
    """What `libero-eval record` says of a corpus in its meta/recording.json."""

    attempts: int
    kept: int
    states: set[tuple[int, int]]  # (task id, initial state) that attempts began in

    @property
    def failed(self) -> int:
        """Attempts that the simulator did not call successful, left out of the corpus."""
        return self.attempts - self.kept


@dataclass(frozen=True)
class Corpus:
    """One LeRobot dataset under corpus/."""

    path: Path
    turn: int
    kind: str  # a key of KINDS
    episodes: int
    source: str | None  # what it was made from, in the words of who made it
    info: dict[str, Any]  # meta/info.json


def corpora(root: Path, ledger: Ledger) -> list[Corpus]:
    """Those of the turns that the run was asked for, by turn and name.

    A stage says in meta/flywheel.json what it made: {"kind": "recorded" | "targets" | "labelled",
    "episodes": count, "source": text}. Without it a corpus counts as recorded, with LeRobot's own count.
    """
    found = []
    for path in sorted(root.glob("corpus/*")):
        if not (path / "meta" / "info.json").is_file():
            continue
        info, said = read_json(path / "meta" / "info.json"), path / "meta" / "flywheel.json"
        about = read_json(said) if said.is_file() else {}
        kind = about.get("kind", "recorded")
        if kind not in KINDS:
            raise UserError(f"{said}: kind: found {kind!r}; allowed: {', '.join(KINDS)}")
        episodes = about.get("episodes", info["total_episodes"])
        _, turn = ledger.place(path.name)
        found.append(Corpus(path, turn, kind, episodes, about.get("source"), info))
    asked = [corpus for corpus in found if corpus.turn <= ledger.turns]
    return sorted(asked, key=lambda corpus: (corpus.turn, corpus.path.name))


@dataclass(frozen=True)
class Mix:
    """Episodes by kind that something was trained on."""

    model: str | None  # None: not said by a training run, but what lay there in that turn
    turn: int
    episodes: dict[str, int]  # by key of KINDS, in its order, none of them 0


def mixes(found: Sequence[Corpus], trainings: Sequence[Training], turns: int) -> list[Mix]:
    """Of each turn: what its training runs say that they read, else all that the turns so far have made."""
    kinds = {corpus.path.name: corpus.kind for corpus in found}
    made = []
    for turn in range(1, turns + 1):
        said = [training for training in trainings if training.turn == turn and training.sources]
        for training in said:
            counts = [(kinds.get(one["name"], "other"), one["episodes"]) for one in training.sources]
            made.append(Mix(training.model, turn, _sums(counts)))
        if not said:
            counts = [(corpus.kind, corpus.episodes) for corpus in found if corpus.turn <= turn]
            made.append(Mix(None, turn, _sums(counts)))
    return [mix for mix in made if mix.episodes]


def _sums(counts: Sequence[tuple[str, int]]) -> dict[str, int]:
    sums = {kind: sum(count for one, count in counts if one == kind) for kind in KINDS}
    return {kind: count for kind, count in sums.items() if count}


def recording(corpus: Path) -> Recording | None:
    """How the corpus was recorded, None where `libero-eval record` did not make it."""
    path = corpus / "meta" / "recording.json"
    if not path.is_file():
        return None
    said = read_json(path)
    tasks, states = (_numbers(said["record"][key]) for key in ("tasks", "init_states"))
    return Recording(said["attempts"], said["kept"], {(task, state) for task in tasks for state in states})


def were_demonstrated(found: Sequence[Corpus], evaluation: Evaluation) -> bool | None:
    """Whether demonstrations up to the evaluation's turn began in any of its states; None where not known."""
    recordings = [recording(corpus.path) for corpus in found if corpus.turn <= evaluation.turn]
    tried = {(row["task_id"], row["init_state"]) for row in evaluation.episodes}
    if any(one is not None and one.states & tried for one in recordings):
        return True
    return False if recordings and None not in recordings else None


def _numbers(text: str) -> list[int]:
    """Those that "0,3-5" names."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)]
